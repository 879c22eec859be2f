"""Commands about models, on a run of the tiny pipeline: images, a merged folder, prompts ahead, costs."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

import flowcredit
from deploy.tools.export import export_model
from flow.maths.noise import normal
from protocol.errors import RunFolderError
from tests.support.full_disk import files_limited
from tests.support.runs.presets import dark_preset


@pytest.fixture
def preset(tmp_path: Path, tiny_sd3: Path) -> Path:
    return dark_preset(tmp_path, tiny_sd3)


@pytest.fixture(scope="module")
def run(tiny_sd3: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one iteration; its preset and embeddings lie beside it."""
    index = tmp_path_factory.mktemp("trained")
    flowcredit.train(dark_preset(index, tiny_sd3), run=index / "run", is_local=True, is_quiet=True)
    return index / "run"


def images(folder: Path) -> np.ndarray:
    return np.stack([np.asarray(Image.open(path)) for path in sorted(folder.glob("*.png"))])


def test_a_run_keeps_the_family_s_adapter_and_encodes_its_prompts_once_ahead(run, cli):
    lora = yaml.safe_load((run / "config.yaml").read_text())["model"]["lora"]
    assert (lora["rank"], lora["alpha"], lora["targets"][0]) == (32, 64, "attn.to_q")
    preset, cache = run.parent / "preset.yaml", run.parent / "embeddings"
    assert len(list(cache.rglob("*.safetensors"))) == 3, "two prompts and one negative"
    assert "encoded" not in cli.done("encode", str(preset)), "the run did"
    shutil.rmtree(cache)
    assert "encoded 3 new prompts" in cli.done("encode", str(preset))


def test_sample_draws_the_same_images_from_equal_arguments(run, tmp_path, cli):
    def drawn(name: str, *words: str) -> np.ndarray:
        out = tmp_path / name
        said = cli.done("generate", str(run), "a cat", "--count", "2", "--out", str(out), *words)
        assert str(out / "001.png") in said.split()
        return images(out)

    first = drawn("first")
    assert first.shape == (2, 16, 16, 3)
    assert np.array_equal(drawn("again"), first)
    assert np.array_equal(drawn("named", "--iteration", "1"), first)
    for name, words in {"base": ["--base"], "seed": ["--seed", "1"], "negative": ["--negative", "x"]}.items():
        assert not np.array_equal(drawn(name, *words), first), name


def test_generate_overwrites_nothing_and_an_image_says_how_it_was_made(run, tmp_path, cli):
    words = ("generate", str(run), "a cat: ünïcode", "--count", "2", "--seed", "3", "--out", str(tmp_path / "out"))
    for _ in range(2):
        cli.done(*words)
    paths = sorted((tmp_path / "out").glob("*.png"))
    assert [path.name for path in paths] == ["000.png", "001.png", "002.png", "003.png"]
    assert np.array_equal(images(tmp_path / "out")[:2], images(tmp_path / "out")[2:])
    with Image.open(paths[3]) as image:
        facts = image.info
    assert (facts["prompt"], facts["seed"], facts["image"], facts["iteration"]) == ("a cat: ünïcode", "3", "1", "1")
    assert facts["run"] == str(run.resolve())
    assert len(facts["adapter"]) == 64


def test_the_adapter_takes_a_share_of_the_steps_and_an_image_says_so(run, tmp_path, cli):
    def drawn(name: str, *words: str) -> tuple[np.ndarray, tuple[str, str]]:
        out = tmp_path / name
        cli.done("generate", str(run), "a cat", "--count", "2", "--out", str(out), *words)
        with Image.open(out / "001.png") as image:
            return images(out), (image.info["adapter_share"], image.info["adapter_steps"])

    (whole, all_steps), (same, _), (mixed, some), (base, none) = (
        drawn("whole"),
        drawn("same", "--adapter-share", "1"),
        drawn("mixed", "--adapter-share", "0.67"),
        drawn("base", "--base"),
    )
    assert (all_steps, some, none) == (("1", "3"), ("0.67", "2"), ("none", "none"))
    assert np.array_equal(same, whole)
    assert not np.array_equal(mixed, whole)
    assert not np.array_equal(mixed, base)
    words = ("generate", str(run), "a cat", "--grid", "--adapter-share", "0.67", "--out", str(tmp_path / "grid"))
    cli.done(*words)
    with Image.open(tmp_path / "grid" / "grid_000.png") as grid:
        assert (grid.info["adapter_share"], grid.info["adapter_steps"]) == ("0.67", "2")


def test_a_prompt_file_gives_images_of_each_prompt_or_a_grid(run, tmp_path, cli):
    prompts, out = tmp_path / "two.jsonl", tmp_path / "out"
    prompts.write_text('{"prompt": "a cat: ünïcode $", "negative_prompt": "x"}\n{"prompt": "a dog"}\n')
    words = ("generate", str(run), "--prompts", str(prompts), "--count", "3", "--seed", "3", "--out", str(out))
    cli.done(*words)
    told = []
    for path in sorted(out.glob("*.png")):
        with Image.open(path) as image:
            told.append((image.info["prompt"], image.info["negative"], image.info["image"]))
    assert told == [(*each, str(number)) for each in (("a cat: ünïcode $", "x"), ("a dog", "")) for number in range(3)]
    drawn = images(out)
    assert not np.array_equal(drawn[0], drawn[3]), "prompts have noise of their own"
    for name in ("grid_000.png", "grid_001.png"):
        assert cli.done(*words, "--grid", "--best").split() == [str(out / name)]
    with Image.open(out / "grid_000.png") as grid:
        assert json.loads(grid.info["prompts"]) == ["a cat: ünïcode $", "a dog"]
        assert (grid.info["seed"], grid.info["iteration"]) == ("3", "1")
        assert grid.width > 300


def test_a_dry_run_compares_with_an_existing_run_and_tells_what_may_not_be_meant(run, cli):
    words = ("train", str(run.parent / "preset.yaml"), "--dry-run", "--run", str(run))
    said = cli.done(*words, "cluster.rollout.gpus=0")
    assert f"{run} already holds this run; training would resume it" in said
    assert "note: 2 of 2 held-out prompts are trained on too" in said
    line = cli.refused(*words, "seed=9")
    assert "belongs to another config: seed (there 0, now 9)" in line


def test_a_dry_run_without_hub_weights_and_gpus_gives_the_estimate_and_a_line_for_each(
    preset, tiny_sd3, tmp_path, monkeypatch, cli
):
    known = tmp_path / "known"
    shutil.copytree(tiny_sd3, known / "example" / "tiny", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr("flow.models.hub.KNOWN", known)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = ("model.path=example/tiny", "cluster.rollout.gpus=1", "rewards.clip={scorer: clipscore, use: evaluate}")
    out, err = cli.ended("train", str(preset), "--dry-run", *words, code=2)
    assert re.search(r"^rollout actor +\d +0\.8 GiB ", out, re.M)
    assert "note: this estimate takes the model's config files that flowcredit ships" in out
    lines = [line for line in err.splitlines() if line.startswith("flowcredit: ")]
    assert len(lines) == 3
    for line, words in zip(
        lines, ("model example/tiny is not complete", "2 GPUs, this machine has 0", "clip-vit-large"), strict=True
    ):
        assert words in line


def test_targets_without_a_module_are_one_line_of_a_dry_run(preset, cli):
    line = cli.refused("train", str(preset), "--dry-run", "model.lora.targets=[nope]")
    assert "model.lora.targets" in line and "got ['nope']" in line


@pytest.mark.parametrize("device", ["banana", "meta"])
def test_a_device_that_torch_cannot_use_is_one_line(device, run, tmp_path, cli):
    line = cli.refused("generate", str(run), "a cat", "--device", device, "--out", str(tmp_path / "out"))
    assert line.startswith(f"flowcredit: --device must be one that torch can use here, such as cpu, got {device!r}: ")
    assert not (tmp_path / "out").exists()


def test_export_merges_what_the_adapter_adds(run, tiny_sd3, tmp_path, cli):
    target = tmp_path / "merged"
    cli.done("export", str(run), str(target))
    absent: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
    merged, adapted, base = (
        diffusers.StableDiffusion3Pipeline.from_pretrained(folder, **absent) for folder in (target, tiny_sd3, tiny_sd3)
    )
    adapted.load_lora_weights(run / "checkpoints" / "iteration_000001")
    with torch.no_grad():
        embeds, _, pooled, _ = base.encode_prompt("a cat", None, None, max_sequence_length=1)
        outputs = [
            pipeline.transformer(
                hidden_states=normal("x", shape=(1, 4, 8, 8)),
                timestep=torch.tensor([500.0]),
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                return_dict=False,
            )[0]
            for pipeline in (merged, adapted, base)
        ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outputs[0], outputs[2], atol=1e-3)
    assert not any("lora" in name for name, _ in merged.transformer.named_parameters())
    assert [path.name for path in tmp_path.glob(".merged*")] == []
    assert len({path.stat().st_mode for path in target.rglob("*") if path.is_file()}) == 1, "all may read all of it"


def test_two_exports_to_one_folder_do_not_disturb_each_other(run, tmp_path, monkeypatch):
    """The second one begins when the first has written all, and ends with an error before it is done."""
    target, save = tmp_path / "merged", diffusers.StableDiffusion3Pipeline.save_pretrained
    begun: list[Path] = []

    def saved(pipeline: Any, folder: Path) -> None:
        begun.append(folder)
        if len(begun) > 1:
            raise OSError("no space")
        save(pipeline, folder)
        with pytest.raises(RunFolderError, match="no space"):
            export_model(run, target)

    monkeypatch.setattr(diffusers.StableDiffusion3Pipeline, "save_pretrained", saved)
    assert export_model(run, target) == target
    assert (target / "model_index.json").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_an_export_to_a_full_disk_is_one_line_and_leaves_nothing(run, tmp_path, cli):
    for name in ("merged", "lora.safetensors"):
        with files_limited(2000):
            said = cli.refused("export", str(run), str(tmp_path / name))
        assert said.startswith(f"flowcredit: {tmp_path / name} cannot be written: ")
        assert "File too large" in said
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [0, 1000])
def test_export_refuses_a_damaged_transformer_with_one_line(run, tiny_sd3, tmp_path, size, cli):
    model, mine = (shutil.copytree(path, tmp_path / path.name) for path in (tiny_sd3, run))
    config = (mine / "config.yaml").read_text()
    (mine / "config.yaml").write_text(config.replace(str(tiny_sd3), str(model)))
    weights = next((model / "transformer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:size])
    said = cli.refused("export", str(mine), str(tmp_path / "merged"))
    assert said.startswith(f"flowcredit: transformer of model folder {model} cannot be loaded")
    assert not (tmp_path / "merged").exists()


def test_export_in_half_precision_halves_the_weights(run, tmp_path, cli):
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        cli.done("export", str(run), str(tmp_path / dtype), "--dtype", dtype)
        sizes[dtype] = (tmp_path / dtype / "transformer" / "diffusion_pytorch_model.safetensors").stat().st_size
    assert sizes["bfloat16"] < 0.7 * sizes["float32"]


def test_an_exported_lora_has_its_strength_in_programs_that_read_no_alpha(run, tiny_sd3, tmp_path, cli):
    """The run's alpha is twice its rank, so a program that takes the rank for alpha would apply half of it."""
    file, half = tmp_path / "new" / "mine.safetensors", tmp_path / "half.safetensors"
    cli.done("export", str(run), str(file))
    cli.done("export", str(run), str(half), "--dtype", "bfloat16")
    held = load_file(file)
    without_header = tmp_path / "bare" / "pytorch_lora_weights.safetensors"
    without_header.parent.mkdir()
    save_file(held, without_header)
    checkpoint = run / "checkpoints" / "iteration_000001"
    stored = load_file(checkpoint / "pytorch_lora_weights.safetensors")
    assert held.keys() == stored.keys()
    for name, tensor in held.items():
        assert torch.equal(tensor, 2 * stored[name] if ".lora_B." in name else stored[name])
        assert torch.equal(load_file(half)[name], tensor.bfloat16())
    deltas = []
    for source in (file, without_header.parent, checkpoint):
        absent: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
        pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(tiny_sd3, **absent)
        pipeline.load_lora_weights(source)
        layer = pipeline.transformer.transformer_blocks[0].attn.to_q
        deltas.append(layer.get_delta_weight("default_0"))
    assert deltas[2].abs().max() > 1e-3
    torch.testing.assert_close(deltas[0], deltas[2])
    assert torch.equal(deltas[0], deltas[1]), "with and without a header the strength is the same"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["generate", "{run}", "a cat", "--iteration", "9"],
            "must hold the checkpoint iteration_000009, got ['iteration_000001']",
        ),
        (["generate", "{tmp}/nothing", "a cat"], "must hold config.yaml, got none"),
        (["generate", "{run}"], "give either a prompt or --prompts FILE"),
        (["generate", "{run}", "caf\udce9"], "the prompt must be Unicode text, got half a surrogate pair in"),
        (["generate", "{run}", "a cat", "--negative", "\udce9"], "--negative must be Unicode text"),
        (["generate", "{run}", "a cat", "--height", "32"], "--height and --width must be given together"),
        (["generate", "{run}", "a cat", "--height", "64", "--width", "64"], "--height and --width must be at most 32"),
        (["generate", "{run}", "a cat", "--prompts", "x.txt"], "give either a prompt or --prompts FILE"),
        (["generate", "{run}", "--prompts", "{tmp}/nothing.txt"], "nothing.txt does not exist"),
        (["generate", "{run}", "--prompts", "x.txt", "--negative", "x"], "--negative belongs to a single prompt"),
        (["generate", "{run}", "a cat", "--best", "--base"], "--best, --iteration and --base each name an adapter"),
        (["generate", "{run}", "a cat", "--base", "--average"], "--average is the running mean of an adapter"),
        (
            ["generate", "{run}", "a cat", "--base", "--adapter-share", "0.5"],
            "--adapter-share is the share of an adapter",
        ),
        (
            ["generate", "{run}", "a cat", "--adapter-share", "1.5"],
            "must be above 0 and at most 1, got 1.5: give 1 for",
        ),
        (["export", "{run}", "{tmp}"], "must not exist yet: name a new one"),
        (["export", "{run}", "{tmp}/file/model"], "cannot be written"),
        (["export", "{run}", "{tmp}/file/a.safetensors"], "cannot be written"),
        (["export", "{run}", "{run}/checkpoints/iteration_000001/pytorch_lora_weights.safetensors"], "must not exist"),
        (["export", "{run}", "{tmp}/new", "--dtype", "int8"], "--dtype must be float32, bfloat16 or float16"),
        (["generate", "{run}", "a cat", "--out", "{tmp}/file"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, words, line, cli):
    (tmp_path / "file").write_text("")
    said = cli.refused(*(word.format(run=run, tmp=tmp_path) for word in words))
    assert line in said


def test_a_dry_run_counts_and_writes_nothing(preset, tmp_path, cli):
    run = tmp_path / "run"
    out = cli.done("train", str(preset), "--dry-run", "--run", str(run))
    assert "2 prompts to train on, 2 held out" in out
    assert "rolls out 8 trajectories and scores 18 images" in out
    assert re.search(r"^peak memory +count +GPU each +host each", out, re.M)
    assert not run.exists()
    assert not (tmp_path / "embeddings").exists()
    shutil.move(tmp_path / "prompts.jsonl", tmp_path / "away")
    cli.refused("train", str(preset), "--dry-run")


def test_encode_without_a_folder_says_so(preset, cli):
    assert "model.embedding_cache must name a folder" in cli.refused(
        "encode", str(preset), "model.embedding_cache=null"
    )


def test_flux_trains_with_every_point_completed_and_its_adapter_loads_in_one_line(preset, tmp_path, cli):
    from tests.support.worlds.tiny_models import write_flux

    tree = yaml.safe_load(preset.read_text())
    flux = write_flux(tmp_path / "flux")
    tree["model"] = {
        "path": str(flux),
        "dtype": "bfloat16",
        "height": 12,
        "width": 16,
        "max_sequence_length": 4,
        "forward_batch": 2,
        "gradient_checkpointing": True,
    }
    preset.write_text(yaml.safe_dump(tree))
    run = tmp_path / "run"
    cli.done("train", str(preset), "--local", "--run", str(run))
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (update,) = [line for line in metrics if "train/loss" in line]
    assert update["probe/ratio_deviation"] == update["train/first_ratio_deviation"] == 0
    assert update["train/grad_norm"] > 0
    lora = yaml.safe_load((run / "config.yaml").read_text())["model"]["lora"]
    assert (lora["rank"], lora["alpha"]) == (64, 128)
    pipeline = diffusers.FluxPipeline.from_pretrained(flux)
    pipeline.load_lora_weights(run / "checkpoints" / "iteration_000001")
    (adapter,) = pipeline.transformer.peft_config.values()
    assert (adapter.r, adapter.lora_alpha) == (64, 128)
    cli.done("generate", str(run), "a cat", "--count", "1", "--out", str(tmp_path / "out"))
    assert images(tmp_path / "out").shape == (1, 12, 16, 3)


def test_a_hub_id_in_the_cache_is_checked_and_estimated_without_a_network(preset, tiny_sd3, tmp_path, monkeypatch, cli):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repo = tmp_path / "hub" / "models--example--tiny"
    shutil.copytree(tiny_sd3, repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    words = ("train", str(preset), "--dry-run", "--run", str(tmp_path / "run"))
    assert "rolls out 8 trajectories" in cli.done(*words, "model.path=example/tiny")
    line = cli.refused(*words, "model.path=example/other")
    assert "run `hf download example/other` where there is a network" in line


def test_a_dry_run_refuses_what_the_run_would_refuse(preset, tmp_path, monkeypatch, cli):
    (file := tmp_path / "file").write_text("")
    (loop := tmp_path / "loop").symlink_to(loop)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    told = {
        ("--fork", str(tmp_path / "nope")): "nope",
        ("--run", str(file)): f"--run must be a folder or a new name, got {file}",
        ("--run", str(file / "new")): f"and {file} is no folder",
        ("--run", str(loop / "new")): f"and {loop} is no folder",
        ("--run", str(tmp_path)): "must be new, empty or a run's own",
        ("model.compile=nope",): "model.compile must be one of torch's backends",
        ("model.norms=triton", "model.dtype=bfloat16"): "model.norms=triton needs GPUs",
        ("rewards.dark.runtime_env={pip: 3}",): "rewards.dark.runtime_env must be a Ray runtime environment",
        ("cluster.reward.labels={pool: a}",): "cluster.reward.labels select nodes of a given cluster",
    }
    for words, message in told.items():
        line = cli.refused("train", str(preset), "--dry-run", *words)
        assert message in line


@pytest.mark.parametrize("words", [("--tflops", "5"), ("--card", "H100")])
def test_a_rate_belongs_to_a_dry_run(preset, tmp_path, words, cli):
    run = tmp_path / "run"
    line = cli.refused("train", str(preset), "--local", "--run", str(run), *words)
    assert "add --dry-run" in line
    assert not run.exists()


@pytest.mark.parametrize("part", ["transformer/config.json", "model_index.json"])
def test_a_damaged_file_of_a_model_is_one_line(preset, tiny_sd3, tmp_path, part, cli):
    model = shutil.copytree(tiny_sd3, tmp_path / "model")
    (model / part).write_text("{")
    line = cli.refused("encode", str(preset), f"model.path={model}")
    assert str(model) in line
