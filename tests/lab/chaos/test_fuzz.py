"""Bad input of every kind ends in one clear line or in a correct result: no traceback, nothing half written."""

import copy
import json
import random
import shutil
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from deploy.folder.read import lines_of
from deploy.presets import load_config
from learner.checkpoint import FILES, MANIFEST, RECENT, newest_checkpoint, write_checkpoint
from protocol.config.model import LoraConfig
from protocol.config.parse import parse_config
from protocol.config.run import DataConfig, RunConfig
from protocol.errors import CheckpointError, ConfigError, ContractError, PromptError, RunFolderError
from protocol.messages import Adapter, LearnerState, Prompt, Rollout, Scores, ShardRequest, digest_of
from protocol.prompts import read_prompts
from tests.lab.faults.fuzz import ODD, damage, mutated

pytestmark = pytest.mark.chaos


def one_line(error: Exception, *, naming: str = "") -> None:
    text = str(error)
    assert naming in text
    assert text.strip()
    assert "\n" not in text
    assert "Traceback" not in text


@pytest.fixture(scope="module")
def tree() -> dict[str, Any]:
    """A whole config with every default written out."""
    return yaml.safe_load(load_config("toy_geneval").to_yaml())


def test_two_thousand_mutated_configs_are_refused_in_one_line_or_are_whole(tree):
    numbers = random.Random(6)
    refused = 0
    for _ in range(2000):
        changed = mutated(copy.deepcopy(tree), numbers)
        try:
            config = parse_config(changed)
        except ConfigError as error:
            one_line(error)
            refused += 1
        else:
            assert parse_config(yaml.safe_load(config.to_yaml())) == config
            assert config.outcome_fields()
    assert 1000 < refused < 2000


def test_damaged_config_files_are_refused_in_one_line_or_are_whole(tree, tmp_path):
    numbers = random.Random(7)
    path = tmp_path / "run.yaml"
    for _ in range(200):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_text(yaml.safe_dump(tree))
        damage(path, numbers)
        try:
            assert isinstance(load_config(path), RunConfig)
        except ConfigError as error:
            one_line(error)


def test_odd_overrides_on_the_command_line_are_one_line_and_leave_no_folder(tmp_path, monkeypatch, cli):
    monkeypatch.chdir(tmp_path)
    numbers = random.Random(8)
    keys = ("seed", "iterations", "model.path", "group", "rewards.geneval.args", "data.train", "a.b", "", "evaluation")
    for _ in range(60):
        word = numbers.choice(
            (f"{numbers.choice(keys)}={numbers.choice(ODD)}", "=", "seed", "group.size=1", "x=[", "--")
        )
        _, said = cli.ended("train", "toy_geneval", "iterations=0", word, "--local", code=2)
        assert "Traceback" not in said
        assert list(tmp_path.iterdir()) == []


LORA = LoraConfig(rank=2, alpha=4)


def learner_state(iteration: int) -> LearnerState:
    numbers = np.random.default_rng(iteration)
    held = {f"transformer.q.lora_{x}.weight": numbers.normal(size=(2, 3)).astype(np.float32) for x in "AB"}
    older = {name: array * 0.5 for name, array in held.items()}
    return LearnerState(
        iteration=iteration,
        adapter=Adapter(version=iteration, arrays=held, digest=digest_of(held)),
        optimizer={f"{name}/exp_avg": array + 1 for name, array in held.items()},
        recent=(Adapter(version=iteration - 1, arrays=older, digest=digest_of(older)),),
    )


def identity(state: LearnerState) -> tuple[int, str, str, str]:
    return (
        state.iteration,
        digest_of(state.adapter.arrays),
        digest_of(state.optimizer),
        digest_of(state.recent[0].arrays),
    )


def test_five_hundred_damaged_checkpoints_are_refused_and_the_one_before_is_taken(tmp_path, caplog):
    numbers = random.Random(9)
    whole = tmp_path / "whole"
    for step in (1, 2, 3):
        write_checkpoint(whole, learner_state(step), LORA, keep=3)
    known = {step: identity(learner_state(step)) for step in (1, 2, 3)}
    refused = 0
    for trial in range(500):
        root = tmp_path / "trial"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(whole, root, symlinks=True)
        harmed = numbers.choice(((3,), (3,), (3, 2), (2,), (1, 2, 3)))
        for iteration in harmed:
            damage(root / f"iteration_{iteration:06d}" / numbers.choice((*FILES, RECENT, MANIFEST)), numbers)
        caplog.clear()
        try:
            found = newest_checkpoint(root)
        except CheckpointError as error:
            one_line(error)
            assert set(harmed) == {1, 2, 3}, f"trial {trial}"
            refused += 1
            continue
        assert found is not None
        assert identity(found[0]) == known[found[0].iteration], f"trial {trial}: an altered state was taken"
        if found[0].iteration < 3:
            assert "checkpoint refused" in caplog.text
            refused += 1
    assert refused > 350


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_malformed_prompt_files_are_refused_in_one_line_or_read_whole(tmp_path, suffix):
    numbers = random.Random(10)
    line = {"tag": "colors", "include": [{"class": "circle", "count": 1}], "prompt": "a red circle"}
    path = tmp_path / f"prompts{suffix}"
    for _ in range(300):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_text("".join(json.dumps(_mutated_line(line, numbers)) + "\n" for _ in range(4)))
        if numbers.random() < 0.7:
            damage(path, numbers)
        try:
            prompts = read_prompts(DataConfig(train=str(path), heldout=str(path)), str(path))
        except PromptError as error:
            one_line(error, naming=str(path))
        else:
            assert prompts
            assert all(prompt.text.strip() for prompt in prompts)


def _mutated_line(line: dict[str, Any], numbers: random.Random) -> Any:
    changed = mutated(line, numbers) if numbers.random() < 0.5 else line
    return json.loads(json.dumps(changed, skipkeys=True))


def test_damaged_metrics_are_refused_in_one_line_or_read_whole(tmp_path):
    numbers = random.Random(11)
    path = tmp_path / "metrics.jsonl"
    for _ in range(300):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.write_text("".join(json.dumps({"iteration": i, "reward/mean": i / 7}) + "\n" for i in range(5)))
        damage(path, numbers)
        try:
            assert all(isinstance(each["iteration"], int) for each in lines_of(tmp_path))
        except RunFolderError as error:
            one_line(error, naming="damaged metrics.jsonl")


shapes = st.lists(st.integers(0, 3), min_size=0, max_size=5).map(tuple)
floats = st.sampled_from([np.float32, np.float64, np.int64])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    members=st.integers(1, 3),
    steps=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    latents=arrays.arrays(floats, shapes, elements=st.integers(0, 3)),
    log_probs=arrays.arrays(np.float32, shapes, elements=st.integers(0, 3)),
    index=arrays.arrays(np.int64, shapes, elements=st.integers(0, 3)),
)
def test_a_rollout_of_any_arrays_is_refused_or_consistent(members, steps, latents, log_probs, index):
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text="a"),
        first_member=0,
        members=members,
        adapter_version=0,
        adapter_digest="d",
    )
    try:
        made = Rollout(request=request, steps=steps, latents=latents, log_probs=log_probs, image_index=index)
    except ContractError as error:
        one_line(error)
    else:
        assert made.latents.shape[0] == members
        assert made.log_probs.shape == (members, len(steps))
        assert made.image_index.shape[0] == members


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    values=arrays.arrays(np.float32, shapes, elements=st.floats(width=32)),
    valid=arrays.arrays(np.bool_, shapes),
    reasons=st.lists(st.text(max_size=3), max_size=4).map(tuple),
    component=arrays.arrays(np.float32, shapes, elements=st.floats(width=32)),
)
def test_scores_of_any_arrays_are_refused_or_consistent(values, valid, reasons, component):
    try:
        made = Scores(values=values, valid=valid, reasons=reasons, components={"c": component})
    except ContractError as error:
        one_line(error)
    else:
        assert made.values.shape == made.valid.shape == made.components["c"].shape == (len(reasons),)


@settings(max_examples=200, deadline=None)
@given(
    held=st.dictionaries(st.text(min_size=1, max_size=4), st.floats(width=32), min_size=1, max_size=3),
    change=st.floats(width=32),
)
def test_a_digest_tells_any_two_adapters_apart_bit_for_bit(held, change):
    before = {name: np.array([value], np.float32) for name, value in held.items()}
    name = sorted(held)[0]
    after = before | {name: np.array([change], np.float32)}
    is_same = before[name].tobytes() == after[name].tobytes()
    assert (digest_of(before) == digest_of(after)) is is_same
