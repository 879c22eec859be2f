"""What does not stop a run but may not be meant is told: on the terminal, in events and in the status."""

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.folder.read import status_of
from deploy.monitor.progress import Progress
from deploy.run.inputs import local_concerns
from deploy.run.run import run_training
from flow.models.text import overlong
from protocol.config.run import RunConfig
from protocol.errors import ScorerError
from tests.support.worlds.tiny_models import CONTEXT_LENGTH, write_flux

SCORER = {"scorer": "tests.support.rewards.dark:Dark"}


@pytest.fixture
def config(tiny_config: Any, tmp_path: Path) -> RunConfig:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a\n" + "b" * 2 * CONTEXT_LENGTH + "\n")
    return tiny_config(
        iterations=1,
        data={"train": str(prompts), "heldout": str(prompts)},
        rewards={"dark": SCORER | {"timeout_s": 5.0}},
        evaluation={"images_per_prompt": 1, "component": "reward"},
        status={"board": "off", "trajectories": 0},
    )


def test_a_run_tells_shared_prompts_long_prompts_and_settings_that_it_cannot_follow(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "run"
    progress = Progress(Console(soft_wrap=True))
    run_training(config, folder=folder, is_local=True, progress=progress)
    said = capsys.readouterr().out
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    file = status_of(folder)
    assert file is not None
    conditions = {condition.type: condition for condition in file.status.conditions}
    for kind, words in (
        ("PromptsApart", "2 of 2 held-out prompts are trained on too"),
        ("PromptsFit", f"longer than the text encoder's {CONTEXT_LENGTH} tokens and lose their ends, such as 'bbbb"),
        ("LocalSettings", "--local does not follow rewards.dark.timeout_s"),
    ):
        assert words in said
        assert any(event["type"] == kind and words in event["message"] for event in events)
        assert conditions[kind].status == "False" and words in conditions[kind].message

    run_training(config, folder=folder, is_local=True, progress=progress)
    assert "1 iterations are done, iterations=1 asks for no more: raise it to go on" in capsys.readouterr().out


def test_settings_that_one_process_cannot_follow_are_named(tiny_config: Any) -> None:
    assert list(local_concerns(tiny_config())) == []
    rewards = {"dark": SCORER | {"timeout_s": 5.0, "runtime_env": {"pip": ["x"]}}}
    ((kind, message),) = local_concerns(tiny_config(rewards=rewards))
    assert kind == "LocalSettings"
    assert "does not follow rewards.dark.timeout_s, rewards.dark.runtime_env" in message


def test_a_t5_encoder_reads_as_many_tokens_as_the_config_says(tiny_config: Any, tmp_path: Path) -> None:
    model = tiny_config(model={"path": str(write_flux(tmp_path / "flux")), "max_sequence_length": 40}).model
    assert overlong(model, ["a" * 38]) == (40, [])
    assert overlong(model, ["a" * 60]) == (40, ["a" * 60])


def test_a_run_without_its_reward_s_weights_ends_before_a_prompt_is_encoded(tiny_config: Any, tmp_path: Path) -> None:
    cache = tmp_path / "embeddings"
    held = tiny_config().model.model_dump()
    config = tiny_config(
        model={**held, "embedding_cache": str(cache)},
        rewards={"clip": {"scorer": "clipscore", "args": {"model": "/no/where"}}},
        data=dict.fromkeys(("train", "heldout"), "pkg://deploy/prompts/ocr_train.txt"),
        evaluation={"component": "reward"},
    )
    with pytest.raises(ScorerError, match="'/no/where' must be a folder or a hub id"):
        run_training(config, folder=tmp_path / "run", is_local=True, progress=Progress(Console()))
    assert not cache.exists()
    assert not (tmp_path / "run").exists()
