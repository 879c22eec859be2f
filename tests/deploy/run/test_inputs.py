"""What does not stop a run but may not be meant is told: on the terminal, in events and in the status."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deploy.folder.read import status_of
from deploy.monitor.progress import Progress
from deploy.monitor.tracker_kinds import kept_id
from deploy.presets import load_config
from deploy.run.inputs import Inputs, check_heldout, check_inputs, concerns, local_concerns
from deploy.run.run import run_training
from flow.models.hub import known_configs
from flow.models.located import Sizes, locate, sizes_of
from flow.models.text import overlong
from protocol.config.parse import parse_config
from protocol.config.run import RunConfig
from protocol.errors import ConfigError, ModelError, PromptError, ScorerError
from protocol.messages import Prompt
from protocol.prompts import read_prompts
from tests.support.worlds.tiny_models import CONTEXT_LENGTH, write_flux
from tests.support.worlds.tiny_qwen import write_flux2_klein, write_z_image

ONE = [Prompt(index=0, text="a")]


def noticed(config: RunConfig, prompts: Sequence[Prompt] = ONE) -> dict[str, str]:
    return dict(concerns(config, Inputs(list(prompts), [], locate(config.model))))


def require_sizes(config: RunConfig) -> None:
    locate(config.model).require_sizes(config)


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
        ("PromptsFit", f"longer than the text encoder's {CONTEXT_LENGTH} tokens and are cut off, such as 'bbbb"),
        ("LocalSettings", "--local ignores rewards.dark.timeout_s"),
    ):
        assert words in said
        assert any(event["type"] == kind and words in event["message"] for event in events)
        assert conditions[kind].status == "False" and words in conditions[kind].message

    run_training(config, folder=folder, is_local=True, progress=progress)
    assert "1 iterations are done, as iterations=1 demands: raise it to continue" in capsys.readouterr().out


def test_settings_that_one_process_cannot_follow_are_named(tiny_config: Any) -> None:
    assert list(local_concerns(tiny_config())) == []
    rewards = {"dark": SCORER | {"timeout_s": 5.0, "runtime_env": {"pip": ["x"]}}}
    ((kind, message),) = local_concerns(tiny_config(rewards=rewards))
    assert kind == "LocalSettings"
    assert "ignores rewards.dark.timeout_s, rewards.dark.runtime_env" in message


def test_a_t5_encoder_reads_as_many_tokens_as_the_config_says(tiny_config: Any, tmp_path: Path) -> None:
    model = tiny_config(model={"path": str(write_flux(tmp_path / "flux")), "max_sequence_length": 40}).model
    assert overlong(locate(model), ["a" * 38]) == (40, [])
    assert overlong(locate(model), ["a" * 60]) == (40, ["a" * 60])


def test_the_template_of_a_chat_counts_and_leaves_less_room(tiny_config: Any, tmp_path: Path) -> None:
    """Each letter is a token, and 38 stand around the prompt: two marks, the roles, line ends and an empty thought."""
    model = tiny_config(model={"path": str(write_z_image(tmp_path / "z")), "max_sequence_length": 80}).model
    assert overlong(locate(model), ["a" * 42, "a" * 43]) == (80, ["a" * 43])


@pytest.mark.parametrize(
    ("write", "name", "sign"),
    [
        (write_flux, "flux", None),
        (lambda folder: write_flux(folder, is_schnell=True), "flux", "without embedded guidance"),
        (write_flux2_klein, "klein", None),
        (lambda folder: write_flux2_klein(folder, is_distilled=True), "klein", "says is_distilled"),
        (write_z_image, "Z-Image", None),
        (write_z_image, "Z-Image-Turbo", "it is named turbo"),
    ],
)
def test_a_distilled_model_is_told_and_a_base_model_is_not(
    tiny_config: Any, tmp_path: Path, write: Any, name: str, sign: str | None
) -> None:
    model = {"path": str(write(tmp_path / name)), "height": 1024, "width": 1024, "max_sequence_length": 64}
    found = noticed(tiny_config(model=model))
    assert set(found) == ({"BaseModel"} if sign else set())
    assert (sign or "") in found.get("BaseModel", "")


def test_images_below_the_model_s_own_size_are_told(tiny_config: Any, tmp_path: Path) -> None:
    def told(**model: Any) -> str | None:
        return noticed(tiny_config(model=tiny_config().model.model_dump() | model)).get("NativeSize")

    assert told() is None
    assert told(height=16, width=16) is None
    assert "images of 16 x 12 are smaller than the model's own 16 x 16" in (told(height=16, width=12) or "")
    flux = str(write_flux(tmp_path / "flux"))
    assert "smaller than the model's own 1024 x 1024" in (told(path=flux, height=16, width=16) or "")


def test_the_warning_proposes_an_evaluation_at_the_own_size_and_ends_with_it(tiny_config: Any) -> None:
    small = tiny_config().model.model_dump() | {"height": 12, "width": 12}

    def told(**evaluation: int) -> str | None:
        return noticed(tiny_config(model=small, evaluation=evaluation)).get("NativeSize")

    assert "evaluation.height=16 evaluation.width=16" in (told() or "")
    assert told(height=12, width=16)
    assert told(height=16, width=16) is None


@pytest.mark.parametrize(
    ("sections", "rule"),
    [
        ({"evaluation": {"height": 18, "width": 16}}, "evaluation.height and evaluation.width must be multiples of 4"),
        ({"evaluation": {"height": 16, "width": 36}}, "evaluation.height and evaluation.width must be at most 32 for"),
        ({"model": {"height": 16, "width": 6}}, "model.height and model.width must be multiples of 4, got 16 and 6"),
    ],
)
def test_a_size_that_the_model_cannot_make_ends_a_run_before_anything_starts(
    config: RunConfig, tmp_path: Path, sections: dict[str, dict[str, int]], rule: str
) -> None:
    tree = config.model_dump()
    for name, values in sections.items():
        tree[name] |= values
    wrong = parse_config(tree)
    with pytest.raises(ModelError, match=rule):
        run_training(wrong, folder=tmp_path / "run", is_local=False, progress=Progress(Console()))
    with pytest.raises(ModelError, match=rule):
        check_heldout(wrong, is_local=True)
    assert not (tmp_path / "run").exists()


class Keeping:
    """A tracker that keeps an id and its records in the run folder, as the built-in ones do."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        kept_id(folder / "mlflow.id", lambda: "abc")
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events").touch()

    def close(self) -> None:
        """Nothing is open."""


class Refused:
    """A tracker whose service does not let it in."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        raise RuntimeError("not logged in")


@pytest.mark.parametrize("names", [("Keeping", "Refused"), ("Refused", "Keeping")])
def test_a_tracker_that_cannot_start_leaves_no_folder_behind(
    config: RunConfig, tmp_path: Path, names: tuple[str, ...]
) -> None:
    trackers = tuple(f"{__name__}:{name}" for name in names)
    status = config.status.model_copy(update={"trackers": trackers, "board": "off"})
    with pytest.raises(ConfigError, match="Refused cannot start: not logged in"):
        run_training(
            config.model_copy(update={"status": status}),
            folder=tmp_path / "run",
            is_local=True,
            progress=Progress(Console()),
        )
    assert not (tmp_path / "run").exists()


def test_a_missing_quantiser_ends_a_run_before_anything_starts(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "torchao" else found(name, *rest)
    )
    tree = config.model_dump()
    tree["model"]["quantize"] = "int8"
    with pytest.raises(ModelError, match=r"pip install 'flowcredit\[quantize\]'"):
        run_training(parse_config(tree), folder=tmp_path / "run", is_local=False, progress=Progress(Console()))
    assert not (tmp_path / "run").exists()


def test_the_toy_world_refuses_images_above_its_own_size() -> None:
    for height in (16, 32):
        require_sizes(load_config("toy_geneval", overrides=[f"evaluation.height={height}", "evaluation.width=32"]))
    with pytest.raises(ModelError, match="evaluation.height and evaluation.width must be at most 32 for this model's"):
        require_sizes(load_config("toy_geneval", overrides=["evaluation.height=64", "evaluation.width=64"]))


def test_sizes_are_those_of_the_pipelines_for_the_models_that_we_ship_config_files_of() -> None:
    for preset, token, most in (
        ("sd35_pickscore", 16, 6144),
        ("flux_pickscore", 16, None),
        ("flux2_klein_pickscore", 16, None),
        ("qwen_image_ocr", 16, None),
        ("z_image_pickscore", 16, None),
    ):
        folder = known_configs(load_config(preset).model.path)
        assert folder is not None
        transformer, vae = (json.loads((folder / part / "config.json").read_text()) for part in ("transformer", "vae"))
        assert sizes_of(transformer, vae) == Sizes(scale=8, token=token, most=most)


def test_nothing_is_told_of_the_toy_world_whose_vae_is_a_tiny_one() -> None:
    config = load_config("toy_geneval")
    assert noticed(config, read_prompts(config.data, config.data.train)) == {}
    small = load_config("toy_geneval", overrides=["model.height=16", "model.width=16"])
    assert "the model's own 32 x 32" in noticed(small)["NativeSize"]


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


@pytest.mark.parametrize("tag", ["score", "missing", "reward/dark"])
def test_a_held_out_tag_cannot_take_the_name_of_another_number(tiny_config: Any, tmp_path: Path, tag: str) -> None:
    """`evaluation/score` would be the mean of this tag instead of the held-out score, without a word."""
    train, heldout = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    lines = [json.dumps({"prompt": "a", "tag": "all"}), json.dumps({"prompt": "b", "tag": tag})]
    train.write_text("\n".join(reversed(lines)))
    heldout.write_text("\n".join(lines))
    held: dict[str, Any] = {"rewards": {"dark": SCORER}, "evaluation": {"component": "reward"}}
    config = tiny_config(**held, data={"train": str(train), "heldout": str(heldout)})
    for check in (check_inputs, check_heldout):
        with pytest.raises(PromptError, match=rf"prompt line 2 \('b'\): the tag .* got '{tag}': rename it"):
            check(config, is_local=True)
    swapped = tiny_config(**held, data={"train": str(heldout), "heldout": str(train)})
    with pytest.raises(PromptError, match=r"prompt line 1 \('b'\)"):
        check_inputs(swapped, is_local=True)
    heldout.write_text(lines[0])
    config = tiny_config(**held, data={"train": str(train), "heldout": str(heldout)})
    assert len(check_inputs(config, is_local=True).heldout) == 1, "a tag of training names no metric"


def test_a_negative_prompt_that_cannot_act_and_a_table_are_named(tiny_config: Any) -> None:
    prompts = [Prompt(index=index, text=f"{index}\ta cat", negative="blurry") for index in range(2)]
    inputs = Inputs(prompts, [], locate(tiny_config().model))
    said = dict(concerns(tiny_config(), inputs))
    assert "2 negative prompts, such as 'blurry', do nothing at model.guidance 1" in said["NegativePrompts"]
    assert "data.train looks like a table" in said["PromptsPlain"]
    assert "NegativePrompts" not in dict(concerns(tiny_config(model={"guidance": 4.5}), inputs))


def test_a_secret_that_ray_logs_is_told(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "SecretsKept" not in noticed(tiny_config())
    sent = {"runtime_env": {"env_vars": {"HF_TOKEN": "word", "A": "1"}}, "metadata": {"job_submission_id": "j"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(sent))
    own = {"redness": {"scorer": "a:B", "runtime_env": {"env_vars": {"MY_KEY": "word"}}}}
    message = noticed(tiny_config(rewards=own, evaluation={"component": "reward"}))["SecretsKept"]
    assert message.startswith("HF_TOKEN in the job's env_vars and MY_KEY in rewards.redness.runtime_env: ")
    assert "word" not in message
