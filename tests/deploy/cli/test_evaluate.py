"""`flowcredit eval`: base and adapter at the same noise, other prompts and scorers; and `train` without a preset."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

from deploy.cli.app import app
from deploy.folder.gallery import read_gallery
from deploy.folder.heldout import read_heldout
from deploy.folder.paired import why_unpaired
from deploy.folder.read import checkpoint_of, lines_of
from deploy.monitor.summary import number
from deploy.tools.evaluate import diversity_of
from deploy.tools.export import export_model
from deploy.tools.generate import generate_images
from flow.models.load import load_backbone
from protocol.config.model import ModelConfig
from protocol.errors import FlowcreditError, InputError
from protocol.messages import Prompt
from tests.support.warm.command import start_python


def said(*words: object) -> str:
    """What a command says, without Ray; its errors are raised."""
    done = CliRunner().invoke(app, [*(str(word) for word in words), "--local"])
    if isinstance(done.exception, FlowcreditError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path) -> Path:
    """A run of one iteration with a seed that its preset does not have; `preset.yaml` is beside it."""
    folder = tmp_path_factory.mktemp("evaluated")
    prompts = folder / "prompts.txt"
    prompts.write_text("a red circle\na blue square\ntwo triangles\n")
    tree: dict[str, Any] = {
        "iterations": 1,
        "model": {"path": str(tiny_sd3), "max_sequence_length": 2, "lora": {"rank": 4, "alpha": 8}},
        "data": {"train": str(prompts), "heldout": str(prompts)},
        "sampling": {"steps": 3},
        "group": {"size": 2, "shard": 2, "per_iteration": 2},
        "learner": {"learning_rate": 0.01},
        "rewards": {"redness": {"scorer": "tests.support.rewards.judges:Redness"}},
        "evaluation": {"steps": 2, "images_per_prompt": 2, "batch": 4},
    }
    (folder / "preset.yaml").write_text(yaml.safe_dump(tree))
    said("train", folder / "preset.yaml", "--no-page", "--run", folder / "run", "seed=3")
    return folder / "run"


@pytest.mark.parametrize(
    "words", [["FOLDER"], ["run"], ["run", "--best"], ["FOLDER", "--iteration", "1"], ["--run", "FOLDER"]]
)
def test_a_run_alone_gives_its_own_last_score(words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWCREDIT_RUNS", str(run.parent))
    found = json.loads(said("eval", *(run if word == "FOLDER" else word for word in words), "--json"))
    (only,) = found["results"]
    assert (only["name"], only["iteration"]) == ("adapter", 1)
    assert only["score"] == lines_of(run)[-1]["evaluation/score"]
    assert found["differences"] == {}


def test_a_run_that_rolls_out_another_adapter_than_it_trains_is_scored_with_the_trained_one(run: Path) -> None:
    other = run.parent / "forward"
    words = ("method=diffusion_nft", "learner.average.decay=0", "evaluation.adapter=trained", "iterations=2")
    said("train", run.parent / "preset.yaml", "--no-page", "--run", other, *words)
    state, _ = checkpoint_of(other)
    assert state.old
    assert state.old.digest != state.adapter.digest
    (only,) = json.loads(said("eval", other, "--json"))["results"]
    assert only["score"] == lines_of(other)[-1]["evaluation/score"]


@pytest.mark.whole
@pytest.mark.ray
def test_on_ray_two_actors_give_the_same(run: Path, tmp_path: Path) -> None:
    words = ("evaluation.batch=2", "evaluation.height=12", "evaluation.width=8", "--base", "--adapter-share", "0.5")
    out = tmp_path / "out"
    command = start_python("-m", "flowcredit", "eval", str(run), "cluster.rollout_actors=2", *words, "--out", str(out))
    assert command.wait(280) == 0, command.stdout.read()
    assert json.loads((out / "evaluation.json").read_text()) == json.loads(said("eval", run, *words, "--json"))


def test_base_and_adapter_see_the_same_noise(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "evaluation"
    words = ("eval", run, "--base", "--json", "--out", out)
    found = json.loads(said(*words, "--diversity", "pkg://toyworld/clip"))
    assert json.loads((out / "evaluation.json").read_text()) == found
    base, adapter = found["results"]
    scores = [line["evaluation/score"] for line in lines_of(run) if "evaluation/score" in line]
    assert [base["score"], adapter["score"]] == scores
    difference = found["differences"]["all kinds"]
    assert difference["value"] == pytest.approx(scores[1] - scores[0], abs=2e-6)
    assert difference["low"] <= difference["value"] <= difference["high"]
    assert np.shape(adapter["scores"]["scores"]["redness"]) == (3, 2)
    assert 0 < base["diversity"] < 2
    assert found["diversity_features"] == "pkg://toyworld/clip"
    assert Image.open(out / "grid.png").width > 100
    with pytest.raises(InputError, match=r"--out .*got .*evaluation\.json"):
        said(*words)


def test_the_base_model_is_that_without_the_lora_that_training_starts_from(run: Path) -> None:
    preset, start = run.parent / "preset.yaml", f"model.lora.start={run / 'checkpoints' / 'iteration_000001'}"
    (plain,) = json.loads(said("eval", preset, "--json"))["results"]
    (started,) = json.loads(said("eval", preset, start, "--json"))["results"]
    assert (started["name"], started["scores"]) == ("base", plain["scores"])
    (adapter,) = json.loads(said("eval", run, "--json"))["results"]
    assert adapter["scores"]["scores"] != plain["scores"]["scores"]


def test_a_lora_is_scored_like_the_run_that_made_it(run: Path) -> None:
    checkpoint = run / "checkpoints" / "iteration_000001"
    base, adapter = json.loads(said("eval", run.parent / "preset.yaml", "--run", checkpoint, "--base", "--json"))[
        "results"
    ]
    assert (base["name"], adapter["name"]) == ("base", "adapter")
    assert adapter["score"] == lines_of(run)[-1]["evaluation/score"] != base["score"]


def test_the_table_has_both_and_an_interval(run: Path) -> None:
    lines = said("eval", run, "--base").splitlines()
    assert lines[0].split() == ["base", "adapter", "difference,", "95", "%"]
    overall = next(line for line in lines if line.startswith("overall"))
    assert "[" in overall
    assert overall.endswith("]  (6 images of 16 x 16, 0 without a score)"), "equal counts are said once"


def test_the_adapter_takes_a_share_of_the_steps_and_the_results_say_so(run: Path) -> None:
    whole = json.loads(said("eval", run, "--base", "--json"))["results"]
    base, mixed = json.loads(said("eval", run, "--base", "--adapter-share", "0.5", "--json"))["results"]
    assert [(each["adapter_share"], each["adapter_steps"]) for each in whole] == [(None, None), (1.0, 2)]
    assert [(each["adapter_share"], each["adapter_steps"]) for each in (base, mixed)] == [(None, None), (0.5, 1)]
    assert base == whole[0], "the base model takes all its steps"
    assert mixed["scores"]["scores"] not in [each["scores"]["scores"] for each in whole]
    (last,) = (line for line in said("eval", run, "--adapter-share", "0.5").splitlines() if "share" in line)
    assert last == "adapter share  0.5: the first 1 of 2 steps, the base model after"
    assert "share" not in said("eval", run)
    assert "share" not in said("eval", run, "--adapter-share", "0.95"), "these are both steps, none is the base model's"


def test_an_evaluation_has_its_own_size_and_training_does_not_notice(run: Path) -> None:
    other = run.parent / "sized"
    words = ("seed=3", "evaluation.height=12", "evaluation.width=8")
    said("train", run.parent / "preset.yaml", "--no-page", "--run", other, *words)
    assert checkpoint_of(other, 1)[0].adapter.digest == checkpoint_of(run, 1)[0].adapter.digest
    held = read_heldout(other)
    assert [(each.iteration, each.height, each.width) for each in held] == [(0, 12, 8), (1, 12, 8)]
    assert read_gallery(other / "gallery", 1)["a red circle"][0].shape == (12, 8, 3)
    (only,) = json.loads(said("eval", other, "--json"))["results"]
    assert only["scores"] == held[-1].model_dump(mode="json")
    assert said("eval", run, *words[1:], "--json") == said("eval", other, "--json")
    assert why_unpaired(read_heldout(run)[0], held[0]) == "the evaluations have images of different sizes"
    (image,) = generate_images(other, [Prompt(index=0, text="a")], out=other / "drawn", count=1, seed=0)
    assert Image.open(image).size == (8, 12)


def test_other_prompts_and_further_scorers(run: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "my prompts: 1.txt"
    prompts.write_text("a green star\na yellow moon\n")
    words = ("--prompts", prompts, "--scorer", "second=tests.support.rewards.judges:Redness")
    (only,) = json.loads(said("eval", "--run", run, *words, "--json"))["results"]
    assert only["scores"]["prompts"] == ["a green star", "a yellow moon"]
    assert only["readings"]["second"] == only["readings"]["redness"]


def test_words_may_set_more_of_a_further_scorer(run: Path) -> None:
    scorer = ("--scorer", "m=tests.support.rewards.judges:Mute", "--scorer", "n=tests.support.rewards.judges:Redness")
    words = ("rewards.m.sees=group", "evaluation.component=n")
    (only,) = json.loads(said("eval", run, *words, *scorer, "--json"))["results"]
    assert only["readings"]["m"] is None
    assert only["scores"]["component"] == "n"
    assert only["score"] == lines_of(run)[-1]["evaluation/score"]
    with pytest.raises(InputError, match="--scorer must have a new name, got 'm'"):
        said("eval", run, "rewards.m={scorer: 'tests.support.rewards.judges:Redness', use: evaluate}", *scorer)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["eval"], "a preset must be named, or a run"),
        (["eval", "toy_genevall"], "unknown preset 'toy_genevall': did you mean 'toy_geneval'"),
        (["eval", "runs/nothing"], "there is no run folder runs/nothing"),
        (["eval", "toy_geneval", "--best"], "--best takes the best checkpoint of a run: name a run"),
        (["eval", "RUN", "--best", "--iteration", "1"], "leave --iteration out"),
        (["eval", "--run", "nothing"], "must hold config.yaml"),
        (
            ["eval", "RUN", "--adapter-share", "0"],
            "above 0 and at most 1, got 0",
        ),
        (["eval", "toy_geneval", "--adapter-share", "0.5"], "--adapter-share is "),
        (["eval", "RUN", "--suite", "genevall"], "unknown suite 'genevall': did you mean 'geneval'"),
        (["eval", "RUN", "--suite", "ocr", "--prompts", "x.txt"], "--suite has prompts of its own"),
        (["eval", "lora.safetensors"], "is a LoRA: name the preset or folder of its model"),
        (["eval", "RUN", "--scorer", "redness=x.y:Z"], "--scorer must have a new name, got 'redness'"),
        (["eval", "RUN", "--prompts", "nothing.txt"], "prompt file nothing.txt does not exist"),
        (["eval", "RUN", "--iteration", "7"], "must hold the checkpoint iteration_000007"),
        (["eval", "RUN", "--diversity", "pkg://toyworld/nothing"], "toyworld/nothing"),
        (["eval", "RUN", "--diversity", "x", "evaluation.images_per_prompt=1"], "diversity needs at least 2 images"),
        (["eval", "RUN", "--out", "/proc/no"], "/proc/no cannot be written"),
        (["eval", "RUN", "evaluation.height=16"], "evaluation.height and evaluation.width"),
        (["eval", "RUN", "evaluation.height=16", "evaluation.width=17"], "must be multiples of 4, got 16 and 17"),
        (["train"], "a preset must be named, or --run with a run to resume"),
        (["train", "seed=4", "--run", "nothing"], "must hold config.yaml"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], rule: str, run: Path) -> None:
    words = [part for word in words for part in (["--run", str(run)] if word == "RUN" else [word])]
    with pytest.raises(InputError, match=rule):
        said(*words)


@pytest.mark.parametrize("setting", ["int8", "nf4"])
def test_a_quantised_run_resumes_exactly_and_exports_the_whole_model(setting: str, run: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed: pip install 'flowcredit[quantize]'")
    preset, words = run.parent / "preset.yaml", (f"model.quantize={setting}", "--no-page")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    said("train", preset, *words, "--run", whole, "iterations=2")
    said("train", preset, *words, "--run", parted, "iterations=1")
    with pytest.raises(InputError, match=rf"model.quantize \(there '{setting}', now None\)"):
        said("train", preset, "--no-page", "--run", parted, "iterations=2")
    said("train", preset, *words, "--run", parted, "iterations=2")
    digests = [checkpoint_of(each, 2)[0].adapter.digest for each in (whole, parted)]
    assert digests[0] == digests[1]
    assert [line["train/first_ratio_deviation"] for line in lines_of(whole) if "reward/mean" in line] == [0, 0]
    merged = Path(export_model(whole, tmp_path / "merged"))
    path, trained = yaml.safe_load(preset.read_text())["model"]["path"], checkpoint_of(whole, 2)[0].adapter.arrays
    low = next(name for name in trained if "lora_A" in name)
    added = torch.from_numpy(2 * trained[low.replace("lora_A", "lora_B")] @ trained[low])  # alpha / rank
    layer = low.removeprefix("transformer.").removesuffix(".lora_A.weight")
    own, whole_again = (
        load_backbone(ModelConfig(path=str(each))).transformer.get_submodule(layer).weight for each in (path, merged)
    )
    torch.testing.assert_close(whole_again, own + added)


def test_train_without_a_preset_goes_on_with_the_runs_own_config(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run", symlinks=True)
    with pytest.raises(InputError, match=r"seed \(there 3, now 0\)"):
        said("train", run.parent / "preset.yaml", "--no-page", "--run", copy)
    said("train", "--no-page", "--run", copy, "iterations=2")
    assert [line["iteration"] for line in lines_of(copy) if "reward/mean" in line] == [1, 2]


DIVERSITY = "rewards.diversity={scorer: diversity, sees: group, use: evaluate, args: {model: pkg://toyworld/clip}}"


def test_a_run_records_the_diversity_that_a_separate_evaluation_measures(run: Path) -> None:
    other = run.parent / "diverse"
    shown = said("train", run.parent / "preset.yaml", "--no-page", "--run", other, "seed=3", DIVERSITY)
    assert checkpoint_of(other)[0].adapter.digest == checkpoint_of(run)[0].adapter.digest
    told = [line["evaluation/reward/diversity"] for line in lines_of(other) if "evaluation/score" in line]
    redness = lines_of(other)[0]["evaluation/reward/redness"]
    assert f"; redness {redness:.2f}, diversity {number(told[0], '.2f')}; 6 images" in shown
    assert re.search(rf"^diversity( falls:)? {told[0]:.3f} → {told[-1]:.3f}$", shown, re.MULTILINE), "the last word"
    found = json.loads(said("eval", other, "--base", "--diversity", "pkg://toyworld/clip", "--json"))["results"]
    assert told == pytest.approx([each["diversity"] for each in found], abs=1e-6)
    assert told == pytest.approx([each["readings"]["diversity"] for each in found])
    assert [each["score"] for each in found] == [
        line["evaluation/score"] for line in lines_of(run) if "evaluation/score" in line
    ]
    table = np.array(found[0]["scores"]["scores"]["diversity"])
    assert np.shape(table) == (3, 2)
    np.testing.assert_allclose(table[:, 0], table[:, 1], atol=2e-6)  # of two images each is as far from the other


def test_an_evaluation_in_which_no_image_can_be_compared_has_no_diversity(run: Path) -> None:
    broken = "rewards.diversity={scorer: 'tests.support.rewards.judges:Mute', sees: group, use: evaluate}"
    (only,) = json.loads(said("eval", run, broken, "--json"))["results"]
    assert only["readings"]["diversity"] is None, "never 0"
    assert only["score"] == lines_of(run)[-1]["evaluation/score"]


def test_diversity_by_hand() -> None:
    alike, across = np.array([[1.0, 0.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    assert diversity_of(np.stack([alike])) == pytest.approx(0.0)
    assert diversity_of(np.stack([alike, across])) == pytest.approx(0.5)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3, 4, 5))
    features /= np.linalg.norm(features, axis=-1, keepdims=True)
    pairs = [1 - each[i] @ each[j] for each in features for i in range(4) for j in range(i)]
    assert diversity_of(features) == pytest.approx(np.mean(pairs))
