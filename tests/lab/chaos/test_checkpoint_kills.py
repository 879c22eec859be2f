"""kill -9 at random moments around a checkpoint: every resume succeeds and ends in the same weights.

The process that is killed learns by a rule that is quick and exact, and writes through the run folder as a run does.
"""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from deploy.folder.run_folder import open_run_folder
from deploy.tools.verify import ledger_faults
from learner.checkpoint import checkpoint_folders
from protocol.config.run import RunConfig
from protocol.messages import Adapter, LearnerState, digest_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.chaos
KILLS, STEPS_AFTER = 50, 20
NAMES = [f"transformer.q{i}.lora_{x}.weight" for i in range(4) for x in "AB"]


def started() -> LearnerState:
    arrays = {name: np.zeros((64, 64), np.float32) for name in NAMES}
    weights = Adapter(version=0, arrays=arrays, digest=digest_of(arrays))
    return LearnerState(iteration=0, adapter=weights, optimizer=arrays)


def learned(state: LearnerState) -> LearnerState:
    """The next state: all that it depends on is the one before and its number."""
    step = state.iteration + 1
    arrays = {
        name: np.float32(0.9) * array + np.float32(step % 7 + index)
        for index, (name, array) in enumerate(state.adapter.arrays.items())
    }
    moments = {name: state.optimizer[name] + arrays[name] for name in NAMES}
    weights = Adapter(version=step, arrays=arrays, digest=digest_of(arrays))
    return LearnerState(iteration=step, adapter=weights, optimizer=moments)


def work(config: RunConfig, path: Path, steps: int | None) -> None:
    """One process: go on from the newest checkpoint, `steps` further or until it is killed."""
    run = open_run_folder(path, config)
    found = run.newest()
    state = found[0] if found else started()
    run.rewind(state.iteration if found else -1)
    end = None if steps is None else state.iteration + steps
    while end is None or state.iteration < end:
        state = learned(state)
        index = 2.0 * (state.iteration - 1)
        run.append({"iteration": state.iteration, "ledger/first": index, "ledger/last": index + 1})
        if state.iteration % 2 == 0:
            run.save(state)
    run.close()


def written(run: Path) -> list[str]:
    """The names of the checkpoints."""
    return sorted(folder.name for folder in checkpoint_folders(run / "checkpoints"))


def test_fifty_kills_around_checkpoints_change_nothing(tiny_config, tmp_path):
    numbers = random.Random(50)
    config = tiny_config(checkpoint={"every": 2, "keep": 3})
    context = multiprocessing.get_context("fork")
    path = tmp_path / "run"
    for kill in range(KILLS + 1):
        process = context.Process(target=work, args=(config, path, None if kill < KILLS else STEPS_AFTER))
        process.start()
        if kill < KILLS:
            if kill % 2 == 0:  # the others may be killed while they begin
                before = written(path)
                wait_until(lambda before=before: written(path) != before)
            time.sleep(numbers.uniform(0.0, 0.1))
            os.kill(process.pid, signal.SIGKILL)
        process.join(120)
        assert process.exitcode == (-signal.SIGKILL if kill < KILLS else 0), "a resume failed by itself"
    run = open_run_folder(path, config)
    found = run.newest()
    lines = run.lines()
    run.close()
    assert found is not None
    expected = started()
    for _ in range(found[0].iteration):
        expected = learned(expected)
    assert expected.iteration >= KILLS + STEPS_AFTER, "every second process that was killed had written a checkpoint"
    assert found[0].adapter.digest == expected.adapter.digest
    assert digest_of(found[0].optimizer) == digest_of(expected.optimizer)
    assert ledger_faults(lines, config.group.per_iteration) == []
    assert len(lines) == expected.iteration
