"""A scorer's model is whole or refused in one line, before a run by its headers and again when it is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTokenizer

from protocol.errors import ScorerError
from rewards.scorer import build_scorer, require_ready
from tests.support.worlds.clips import write_clip, write_segmenter

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("sound") / "clip")


def changed(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return damage


def pickled_without_one(folder: Path) -> None:
    file = folder / "model.safetensors"
    held = load_file(file)
    del held["visual_projection.weight"]
    torch.save(held, folder / "pytorch_model.bin")
    file.unlink()


def processor_cut(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text("{")


def processor_of_another_size(folder: Path) -> None:
    (folder / "preprocessor_config.json").write_text("{}")  # 224 pixels


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def quantised(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "bitsandbytes"}})
    )


def without_words(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def of_few_words(folder: Path) -> None:
    CLIPTokenizer(vocab={"<|startoftext|>": 0, "<|endoftext|>": 1}, merges=[]).save_pretrained(folder)


@pytest.mark.parametrize(
    ("scorer", "damage", "message"),
    [
        (
            "pickscore",
            changed(lambda held: {name: held[name] for name in held if name != "text_projection.weight"}),
            "tensors of a CLIPModel, got 1 missing, such as text_projection.weight",
        ),
        ("clipscore", changed(lambda held: held | {"extra": torch.ones(1)}), "1 unknown, such as extra"),
        (
            "diversity",
            changed(lambda held: held | {"visual_projection.weight": torch.ones(12, 15)}),
            "1 of another shape, such as visual_projection.weight",
        ),
        ("clipscore", pickled_without_one, "1 missing, such as visual_projection.weight"),
        ("pickscore", processor_cut, "cannot be loaded: .*preprocessor_config.json"),
        ("hpsv2", processor_of_another_size, "image processor of '.*clip' must crop images to .* 24 pixels, got 224"),
        ("hpsv2", cut, "cannot be loaded: .*not fully covered"),
        ("pickscore", quantised, "not quantised, got quantization_config bitsandbytes: use the unquantised model"),
        (
            "clipscore",
            changed(lambda held: held | {"visual_projection.weight": held["visual_projection.weight"].char()}),
            "not quantised, got I8 for visual_projection.weight and no quantization_config: use the unquantised model",
        ),
        ("pickscore", without_words, "must hold tokenizer.json or vocab.json and merges.txt, got no vocab.json"),
        ("clipscore", of_few_words, "the tokenizer of '.*clip' must have about as many tokens .*, got 2 for 190 rows"),
    ],
)
def test_a_clip_that_is_not_whole_is_refused_by_its_headers_too(
    scorer: str, damage: Damage, message: str, sound: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(sound, tmp_path / "clip")
    damage(folder)
    for read in (build_scorer, lambda name, **args: require_ready(name, args)):
        with pytest.raises(ScorerError, match=message) as caught:
            read(scorer, model=str(folder))
        assert "\n" not in str(caught.value) and str(folder) in str(caught.value)
    assert "LOAD REPORT" not in capfd.readouterr().err, "the library says so in a table"


def test_buffers_that_published_clips_hold_are_ignored(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "clip")
    names = ("text_model.embeddings.position_ids", "vision_model.embeddings.position_ids")
    changed(lambda held: held | {name: torch.arange(4)[None] for name in names})(folder)
    build_scorer("pickscore", model=str(folder))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "preprocessor_config.json").unlink(), "must hold a file preprocessor_config.json or"),
        (processor_cut, "cannot be loaded: .*preprocessor_config.json"),
    ],
)
def test_a_detector_that_is_not_whole_is_refused_before_its_first_image(
    damage: Damage, message: str, sound: Path, tmp_path: Path
) -> None:
    folder = write_segmenter(tmp_path / "segmenter")
    damage(folder)
    with pytest.raises(ScorerError, match=message):
        require_ready("geneval", {"detector_args": {"model": str(folder), "clip": str(sound)}})
