"""The embedding cache: equal numbers, encoders asked once and freed, names that change with what they depend on."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from flow.models.completed import completed
from flow.models.contract import Backbone
from flow.models.embeddings import Embeddings, digest_of_files
from flow.models.families import SD3
from flow.models.load import load_backbone, open_embeddings
from protocol.config.model import ModelConfig
from protocol.errors import ModelError


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The folders from which text encoders were loaded, in order."""
    seen: list[Path] = []
    load = StableDiffusion3Pipeline.from_pretrained

    def watched(folder: Path, **parts: Any) -> Any:
        if parts["transformer"] is None:  # since only the encoders are wanted
            seen.append(folder)
        return load(folder, **parts)

    monkeypatch.setattr(StableDiffusion3Pipeline, "from_pretrained", watched)
    digest_of_files.cache_clear()
    return seen


def config_of(folder: Path, cache: Path | None, **settings: Any) -> ModelConfig:
    return ModelConfig(
        **{"path": str(folder), "max_sequence_length": 2, "embedding_cache": str(cache) if cache else None} | settings
    )


def equal(first: Any, second: Any) -> bool:
    one, other = first.tensors, second.tensors
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def files(cache: Path) -> set[Path]:
    return {path.relative_to(cache) for path in cache.rglob("*") if path.is_file()}


def test_cached_embeddings_are_the_encoders_own_and_cost_no_encoder(tiny_sd3: Path, tmp_path: Path, loads) -> None:
    direct = load_backbone(config_of(tiny_sd3, None)).encode("a red circle")
    assert len(loads) == 1
    ahead = open_embeddings(config_of(tiny_sd3, tmp_path), device="cpu")
    assert ahead.fill([("a red circle", ()), ("", ()), ("a red circle", ())]) == 2
    ahead.free()
    assert len(loads) == 2
    backbone: Backbone = load_backbone(config_of(tiny_sd3, tmp_path))
    assert equal(backbone.encode("a red circle"), direct)
    assert not equal(backbone.encode(""), direct)
    assert len(loads) == 2, "nothing was encoded again"
    assert ahead.fill([("", ()), ("a red circle", ())]) == 0
    assert len(loads) == 2
    assert len(files(tmp_path)) == 2


def test_other_versions_of_the_libraries_encode_anew(tiny_sd3: Path, tmp_path: Path, loads, monkeypatch) -> None:
    open_embeddings(config_of(tiny_sd3, tmp_path), device="cpu").fill([("a cat", ())])
    monkeypatch.setattr("flow.models.embeddings.versions_of", lambda *names: dict.fromkeys(names, "99"))
    assert open_embeddings(config_of(tiny_sd3, tmp_path), device="cpu").fill([("a cat", ())]) == 1
    assert len(loads) == 2


def test_a_text_that_is_missing_is_encoded_kept_and_the_encoders_freed(tiny_sd3: Path, tmp_path: Path, loads) -> None:
    backbone = load_backbone(config_of(tiny_sd3, tmp_path))
    first = backbone.encode("a cat")
    assert equal(load_backbone(config_of(tiny_sd3, tmp_path)).encode("a cat"), first)
    assert len(loads) == 1
    backbone.encode("a dog")
    assert len(loads) == 2, "the encoders were freed, so another text loads them again"


def test_other_length_or_dtype_or_encoder_is_another_entry(tiny_sd3: Path, tmp_path: Path, loads) -> None:
    cache, changed = tmp_path / "cache", tmp_path / "changed"
    load_backbone(config_of(tiny_sd3, cache)).encode("a cat")
    load_backbone(config_of(tiny_sd3, cache, max_sequence_length=3)).encode("a cat")
    load_backbone(config_of(tiny_sd3, cache, dtype="bfloat16")).encode("a cat")
    shutil.copytree(tiny_sd3, changed)
    load_backbone(config_of(changed, cache)).encode("a cat")
    assert len(loads) == len(files(cache)) == 3, "a copy of the same encoders is the same"
    weights = changed / "text_encoder" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x07")
    digest_of_files.cache_clear()
    load_backbone(config_of(changed, cache)).encode("a cat")
    assert len(files(cache)) == 4


def test_a_damaged_entry_is_encoded_again(tiny_sd3: Path, tmp_path: Path, loads) -> None:
    first = load_backbone(config_of(tiny_sd3, tmp_path)).encode("a cat")
    (entry,) = files(tmp_path)
    (tmp_path / entry).write_bytes(b"cut of")
    assert equal(load_backbone(config_of(tiny_sd3, tmp_path)).encode("a cat"), first)
    assert len(loads) == 2
    assert equal(load_backbone(config_of(tiny_sd3, tmp_path)).encode("a cat"), first)
    assert len(loads) == 2


def test_a_file_of_the_hub_s_cache_is_known_by_its_blob(tiny_sd3: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    shutil.copytree(tiny_sd3, snapshot)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    file = snapshot / "text_encoder" / "model.safetensors"
    shutil.move(file, blobs / "0123abc")
    file.symlink_to(blobs / "0123abc")
    digest_of_files.cache_clear()
    first = digest_of_files(SD3, snapshot, False)
    file.unlink()
    shutil.copy(blobs / "0123abc", blobs / "4567def")
    file.symlink_to(blobs / "4567def")
    digest_of_files.cache_clear()
    assert digest_of_files(SD3, snapshot, False) != first


def test_a_folder_that_cannot_be_written_is_a_model_error(tiny_sd3: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    backbone = load_backbone(config_of(tiny_sd3, tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="embedding_cache .* cannot be written"):
        backbone.encode("a cat")


def test_a_run_names_its_cache_from_the_root(tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    held = tiny_config().model.model_dump()
    config = completed(tiny_config(model={**held, "embedding_cache": "cache"}))
    assert config.model.embedding_cache == str(tmp_path / "cache")
    assert completed(config) == config


def test_encoding_ahead_needs_a_folder(tiny_sd3: Path) -> None:
    embeddings: Embeddings = open_embeddings(config_of(tiny_sd3, None), device="cpu")
    with pytest.raises(ModelError, match="embedding_cache must name a folder"):
        embeddings.fill([("a cat", ())])
