"""The guard against reward hacking: what it compares, when it speaks, and that a resume does not make it forget."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flow.adapter.lora_file import read_lora
from learner.checkpoint import write_checkpoint
from learner.loop.hacking import HackingGuard, Measured, Readings, rose
from protocol.config.model import LoraConfig
from protocol.config.run import EvaluationConfig, RunConfig
from protocol.errors import GuardError
from protocol.messages import Adapter, LearnerState, digest_of
from tests.support.runs.sinks import Said

Config = Callable[..., RunConfig]
NOISE = np.random.default_rng(0).normal(0, 0.1, (8, 4))


def watched(tiny_config: Config, **guards: Any) -> RunConfig:
    scorer = "benchmarks.scorers:Redness"
    rewards = {"red": {"scorer": scorer}, "eyes": {"scorer": scorer, "use": "evaluate"}}
    return tiny_config(rewards=rewards, guards=guards)


def readings(red: float, eyes: float) -> Readings:
    return {"score": np.zeros((8, 4)), "red": red + NOISE, "eyes": eyes + NOISE[::-1]}


def measured(iteration: int, found: Readings) -> Measured:
    return Measured(iteration, found, {name: float(table.mean()) for name, table in found.items()})


def in_folder(iteration: int) -> Path | None:
    return Path(f"runs/a/checkpoints/{iteration}") if iteration else None


def seen(config: RunConfig, *values: tuple[float, float], earlier: int = 0) -> Said:
    said = Said()
    found = [measured(10 * index, readings(*each)) for index, each in enumerate(values)]
    guard = HackingGuard(config, said, find=in_folder, earlier=found[:earlier])
    for each in found[earlier:]:
        guard.check(each)
    return said


def test_differences_are_measured_in_their_own_standard_errors() -> None:
    before, after = np.array([[0.0, 0.0, 1.0, np.nan]]), np.array([[1.0, 3.0, 3.0, 5.0]])
    # Differences 1, 3, 2: mean 2, standard deviation 1, standard error 1 / sqrt(3).
    assert rose(before, after) == pytest.approx(2 * math.sqrt(3))
    assert rose(after, before) == pytest.approx(-2 * math.sqrt(3))
    assert rose(before, before) == 0
    assert rose(before, before - 1) == -math.inf
    assert rose(before[:, :1], after[:, :1]) == 0, "one image is no evidence"


def test_a_fall_beside_a_rise_is_told_after_two_evaluations_and_taken_back(tiny_config: Config) -> None:
    values = [(0.1, 0.5), (0.3, 0.6), (0.4, 0.5), (0.5, 0.4), (0.6, 0.7)]
    said = seen(watched(tiny_config), *values)
    (kind, holds, _, message), (_, again, _, _) = said.conditions
    assert (kind, holds, again) == ("Guard/hacking", False, True)
    assert "'eyes'" in message
    assert f"{0.4 + NOISE.mean():.4f} at iteration 30 after {0.6 + NOISE.mean():.4f} at iteration 10" in message
    assert "kept: runs/a/checkpoints/10" in message
    assert "--iteration 10, " in message


def test_where_the_running_mean_is_evaluated_the_advice_takes_the_running_mean(
    tiny_config: Config, tmp_path: Path
) -> None:
    zeros = np.zeros((4, 4), np.float32)
    pairs = {f"transformer.blocks.0.to_q.lora_{each}.weight": zeros for each in "AB"}
    lora = LoraConfig(rank=4, alpha=8)
    config = watched(tiny_config).model_copy(update={"evaluation": EvaluationConfig(adapter="average")})
    adapter, average = (Adapter(arrays=pairs, version=0, digest=digest_of(pairs)) for _ in range(2))
    state = LearnerState(iteration=0, adapter=adapter, average=average, optimizer={})
    folder = write_checkpoint(tmp_path, state, lora, keep=1)
    said = Said()
    guard = HackingGuard(config, said, find=lambda iteration: None if iteration else folder)
    for index, each in enumerate([(0.1, 0.6), (0.3, 0.5), (0.4, 0.4)]):
        guard.check(measured(10 * index, readings(*each)))
    (message,) = (each.message for each in said.conditions)
    assert "--iteration 0 --average" in message
    start = message.partition("model.lora.start=")[2].partition(";")[0]
    assert Path(start) != folder
    assert read_lora(Path(start), version=0).digest == average.digest


def test_the_peak_is_the_first_of_the_highest_also_after_a_resume(tiny_config: Config) -> None:
    found = [measured(10 * index, readings(0.1, eyes)) for index, eyes in enumerate((0.5, 0.6, 0.6, 0.4))]
    for mode, peaks in (("warn", {10}), ("stop", {10}), ("off", set())):
        for earlier in range(5):
            guard = HackingGuard(watched(tiny_config, hacking=mode), Said(), find=in_folder, earlier=found[:earlier])
            for each in found[earlier:]:
                guard.check(each)
            assert guard.peaks == peaks


def test_a_mean_of_the_metrics_decides_not_one_of_rounded_readings(tiny_config: Config) -> None:
    guard, table = HackingGuard(watched(tiny_config), Said(), find=in_folder), readings(0.1, 0.5)
    guard.check(Measured(0, table, {"eyes": 0.50000001}))
    guard.check(Measured(10, table, {"eyes": 0.50000002}))
    guard.check(Measured(20, table, {"eyes": math.nan}))
    assert guard.peaks == {10}


def test_readings_that_have_not_changed_do_not_fall_after_a_resume(tiny_config: Config) -> None:
    """A run folder holds 0.666667 for two thirds; in float32 they lie 3e-7 below it, for every image alike."""
    third, config = np.full((8, 4), 2 / 3, np.float32), watched(tiny_config, hacking="stop", hacking_evaluations=1)
    held = Measured(0, {"red": NOISE, "eyes": np.full((8, 4), 0.666667)}, {"eyes": float(third.mean())})
    guard = HackingGuard(config, Said(), find=in_folder, earlier=[held])
    guard.check(Measured(10, {"red": NOISE + 0.5, "eyes": third}, {"eyes": float(third.mean())}))


def test_a_checkpoint_is_named_that_is_better_than_now_also_one_whose_readings_are_lost(tiny_config: Config) -> None:
    """A run that began again from copies has the metrics of all evaluations, but not the images' readings."""
    means = (0.5, 0.9, 0.6, 0.7, 0.5, 0.4)  # the readings of the first three are lost; the peak since then is at 30
    found = [measured(10 * index, readings(0.1 * index, eyes)) for index, eyes in enumerate(means)]
    lost = [Measured(each.iteration, {}, each.means) for each in found[:3]]
    for held, best in (({10, 20, 50}, 10), ({0, 20, 50}, 20), ({20, 30, 50}, 30), ({50}, None)):
        said = Said()
        folders = {iteration: Path(f"checkpoints/{iteration}") for iteration in held}
        guard = HackingGuard(watched(tiny_config), said, find=folders.get, earlier=lost)
        for each in found[3:]:
            guard.check(each)
        (message,) = (each.message for each in said.conditions)
        assert "at iteration 30 (in 2 evaluations in a row)" in message
        named = "the adapter of iteration 30 was better"
        if best is not None:
            named = f"the better checkpoint is kept: checkpoints/{best}; "
            assert (
                f"--iteration {best}, and a new run starts from it with model.lora.start=checkpoints/{best}" in message
            )
        assert named in message


@pytest.mark.parametrize(
    "values",
    [
        [(0.1, 0.5), (0.3, 0.6), (0.5, 0.7), (0.6, 0.8)],
        [(0.5, 0.6), (0.3, 0.5), (0.2, 0.4), (0.1, 0.3)],
        [(0.1, 0.6), (0.3, 0.5), (0.1, 0.5), (0.3, 0.5)],
    ],
    ids=["both rise", "both fall", "never twice in a row"],
)
def test_other_courses_say_nothing(tiny_config: Config, values: list[tuple[float, float]]) -> None:
    assert seen(watched(tiny_config), *values).conditions == []


def test_a_difference_within_the_noise_says_nothing(tiny_config: Config) -> None:
    said, config = Said(), watched(tiny_config, hacking_evaluations=1)
    guard = HackingGuard(config, said, find=in_folder)
    guard.check(measured(0, {"red": NOISE, "eyes": NOISE}))
    other = np.random.default_rng(1).normal(-0.01, 0.1, NOISE.shape)
    guard.check(measured(1, {"red": NOISE + 0.5, "eyes": other}))
    assert said.conditions == []


def test_stop_ends_the_run_also_after_a_resume_and_off_is_silent(tiny_config: Config) -> None:
    values = [(0.1, 0.6), (0.3, 0.5), (0.4, 0.4)]
    assert seen(watched(tiny_config, hacking="off"), *values).conditions == []
    for earlier in (0, 1, 2):
        with pytest.raises(GuardError, match="iteration 20 after .* at iteration 0 .* kept: runs/a/checkpoints/10; "):
            seen(watched(tiny_config, hacking="stop"), *values, earlier=earlier)
