"""Hub ids without a network: a model in the hub's cache is found, one that is not is explained."""

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from torch._subclasses.fake_tensor import FakeTensorMode

from deploy.folder.read import require_same
from deploy.run.inputs import read_inputs
from flow.models.completed import completed, completed_for_estimate
from flow.models.hollow import hollow_backbone
from flow.models.hub import known_configs, lora_path, model_folder
from flow.models.load import load_backbone, open_embeddings
from flow.models.located import locate
from protocol.config.model import ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError, RunFolderError
from protocol.ground.hub import is_hub_id

NOTICES = logging.getLogger("huggingface_hub.utils._http")
REPO, COMMIT, OTHER = "example/tiny-sd3", "1" * 40, "2" * 40
LORA, DECODER, VAE = "example/lora", "example/decoder", "vae/config.json"
SD35 = "stabilityai/stable-diffusion-3.5-medium"


@pytest.fixture
def cache(tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache as a download would leave it, and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    repo = tmp_path / "models--example--tiny-sd3"
    for commit, branch in ((COMMIT, "main"), (OTHER, "next")):
        shutil.copytree(tiny_sd3, repo / "snapshots" / commit)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / branch).write_text(commit)
    return repo


def model(**settings: Any) -> ModelConfig:
    return ModelConfig(**{"path": REPO, "max_sequence_length": 2} | settings)


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        (SD35, True),
        ("black-forest-labs/FLUX.1-dev", True),
        ("/data/model", False),
        ("./model", False),
        ("~/model", False),
        ("model", False),
        ("data/models/sd3", False),
    ],
)
def test_a_hub_id_is_told_from_a_folder(path: str, is_id: bool) -> None:
    assert is_hub_id(path) == is_id


@pytest.mark.parametrize(("revision", "commit"), [(None, COMMIT), ("main", COMMIT), ("next", OTHER), (OTHER, OTHER)])
def test_a_cached_model_is_found_by_its_revision(cache: Path, revision: str | None, commit: str) -> None:
    located = locate(model(revision=revision), is_whole=True)
    assert (located.family.name, located.commit) == ("sd3", commit)
    assert located.folder == cache / "snapshots" / commit


def test_a_run_pins_the_commit_of_its_model(cache: Path, tiny_config: Any) -> None:
    config = tiny_config(model={"path": REPO, "revision": "next"})
    pinned = completed(config).model
    assert pinned.revision == OTHER
    (cache / "refs" / "next").write_text(COMMIT)
    assert completed(config).model.revision == COMMIT
    assert locate(pinned, is_whole=True).folder == cache / "snapshots" / OTHER
    local = tiny_config()
    assert completed(local).model.revision is None


def test_a_run_pins_the_commit_of_the_lora_that_it_starts_from(cache: Path, tiny_config: Any, tmp_path: Path) -> None:
    repo = tmp_path / "models--example--lora"
    for commit, branch in ((COMMIT, "main"), (OTHER, "next")):
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / branch).write_text(commit)

    def started(**lora: Any) -> RunConfig:
        return tiny_config(model={"lora": {"rank": 4, "alpha": 8, "start": LORA, **lora}})

    first = completed(started())
    assert first.model.lora.revision == COMMIT
    assert completed(started(revision="next")).model.lora.revision == OTHER
    (repo / "refs" / "main").write_text(OTHER)
    assert completed(first) == first, "an actor, or the resumed run's own config, keeps the commit"
    assert lora_path(LORA, first.model.lora.revision) == str(repo / "snapshots" / COMMIT)
    with pytest.raises(RunFolderError, match=rf"model.lora.revision \(there '{COMMIT}', now '{OTHER}'\)"):
        require_same("runs/mine", first, completed(started()), remedy="give the run's own")
    with pytest.raises(ModelError, match=f"the LoRA {LORA} at revision v9 is not complete in the hub"):
        completed(started(revision="v9"))
    local = started(start=str(repo / "snapshots" / COMMIT))
    assert completed(local).model.lora.revision is None


def test_a_run_pins_the_commit_of_its_tiny_decoder(
    cache: Path, tiny_config: Callable[..., RunConfig], tmp_path: Path
) -> None:
    repo, held = tmp_path / "models--example--decoder", json.loads((cache / "snapshots" / COMMIT / VAE).read_text())
    sizes = {"encoder_block_out_channels": [4, 4], "decoder_block_out_channels": [4, 4]}
    for commit, branch in ((COMMIT, "main"), (OTHER, "next")):
        settings = {"_class_name": "AutoencoderTiny", "latent_channels": held["latent_channels"], **sizes}
        (repo / "snapshots" / commit).mkdir(parents=True)
        (repo / "snapshots" / commit / "config.json").write_text(json.dumps(settings))
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / branch).write_text(commit)

    def of(**settings: Any) -> RunConfig:
        return tiny_config(model={"tiny_decoder": DECODER, **settings})

    first = completed(of())
    assert first.model.tiny_decoder_revision == COMMIT
    assert completed(of(tiny_decoder_revision="next")).model.tiny_decoder_revision == OTHER
    (repo / "refs" / "main").write_text(OTHER)
    assert completed(first) == first, "an actor, or the resumed run's own config, keeps the commit"
    folder = locate(model(**first.model.model_dump(include={"tiny_decoder", "tiny_decoder_revision"}))).tiny_decoder(
        is_whole=False
    )
    assert folder == repo / "snapshots" / COMMIT
    with pytest.raises(ModelError, match=f"{DECODER} at revision v9"):
        completed(of(tiny_decoder_revision="v9"))
    local = of(tiny_decoder=str(repo / "snapshots" / COMMIT))
    assert completed(local).model.tiny_decoder_revision is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"revision": "v1"}, "model.revision .*model.path, got 'v1'"),
        ({"lora": {"revision": "v1"}}, "model.lora.revision .* null there"),
        ({"lora": {"start": ".", "revision": "v1"}}, "model.lora.revision .*model.lora.start"),
        ({"tiny_decoder_revision": "v1"}, "model.tiny_decoder_revision "),
    ],
)
def test_a_revision_without_a_hub_id_is_refused(
    tiny_config: Callable[..., RunConfig], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=f"^{message}"):
        read_inputs(tiny_config(model=settings))


def test_an_estimate_without_a_network_drops_the_revisions_of_what_it_replaces(
    cache: Path, tiny_config: Callable[..., RunConfig]
) -> None:
    lora = {"rank": 4, "alpha": 8, "start": LORA, "revision": "v1"}
    config, _ = completed_for_estimate(tiny_config(model={"path": SD35, "revision": "v1", "lora": lora}))
    assert (config.model.revision, config.model.lora.revision) == (None, None)


def test_an_estimate_without_a_network_leaves_out_a_lora_of_the_hub(cache: Path, tiny_config: Any) -> None:
    lora = {"rank": 4, "alpha": 8, "start": LORA}
    config, missing = completed_for_estimate(tiny_config(model={"path": SD35, "lora": lora}))
    assert (config.model.lora.start, config.model.path) == (None, str(known_configs(SD35)))
    assert f"model {SD35} is not complete in the hub" in str(missing)
    config, missing = completed_for_estimate(tiny_config(model={"lora": lora}))
    assert config.model.lora.start is None and f"the LoRA {LORA} is not complete in the hub" in str(missing)
    with pytest.raises(ModelError, match="model example/other is not complete in the hub"):
        completed_for_estimate(tiny_config(model={"path": "example/other", "lora": lora}))


def test_a_cached_model_draws_as_its_folder_does(cache: Path, tiny_sd3: Path) -> None:
    hub, local = (load_backbone(config) for config in (model(), model(path=str(tiny_sd3))))
    first, second = (each.encode("a cat").tensors for each in (hub, local))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_where_the_embedding_cache_has_every_prompt_no_text_encoder_is_downloaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, asked = model(embedding_cache=str(tmp_path / "embeddings")), set[str]()

    def watched(repo: str, revision: str | None, parts: Sequence[str]) -> Path:
        asked.update(parts)
        return model_folder(repo, revision, parts)

    monkeypatch.setattr("flow.models.located.model_folder", watched)
    expected = load_backbone(model()).encode("a cat").tensors
    assert open_embeddings(config, device="cpu").fill([("a cat", ())]) == 1
    assert "text_encoder" in asked
    for part in ("text_encoder", "tokenizer_2"):
        shutil.rmtree(cache / "snapshots" / COMMIT / part)
    asked.clear()
    backbone = load_backbone(config)
    found = backbone.encode("a cat").tensors
    assert asked == {"transformer", "vae", "scheduler"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(ModelError, match="got none for .*'text_encoder'"):
        backbone.encode("a dog")


def test_a_folder_of_that_name_comes_first(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(cache / "snapshots" / COMMIT, tmp_path / REPO)
    assert locate(model()).folder == Path(REPO)


def test_offline_without_the_model_says_what_to_do(cache: Path) -> None:
    with pytest.raises(
        ModelError,
        match=r"model example/other .*HF_HUB_OFFLINE",
    ):
        locate(model(path="example/other"))
    with pytest.raises(ModelError, match="example/tiny-sd3 at revision v9"):
        locate(model(revision="v9"))


def test_a_cached_model_that_lacks_a_part_is_refused(cache: Path) -> None:
    shutil.rmtree(cache / "snapshots" / COMMIT / "vae")
    with pytest.raises(ModelError, match="got none for .*'vae'"):
        locate(model(), is_whole=True)


def test_neither_folder_nor_hub_id_is_said(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist: set model.path"):
        locate(model(path=str(tmp_path / "nothing")))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError, "https://huggingface.co/example/tiny-sd3 .*HF_TOKEN"),
        (errors.RepositoryNotFoundError, "neither .*model.path"),
        (errors.RevisionNotFoundError, "set model.revision"),
        (errors.RemoteEntryNotFoundError, "model_index.json"),
        (errors.HfHubHTTPError, "cannot be fetched: 503"),
    ],
)
def test_what_the_hub_refuses_is_explained(error: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    response = SimpleNamespace(headers={}, request=None)

    def refuse(*_: Any, **__: Any) -> None:
        raise error("503 busy", response=response)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(ModelError, match=message):
        locate(model())


def test_a_revision_that_a_lora_lacks_is_named_by_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise errors.RevisionNotFoundError("404", response=cast("Any", SimpleNamespace(headers={}, request=None)))

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelError, match=f"{LORA} at revision v9 .*model.lora.revision"):
        lora_path(LORA, "v9")


def test_the_hubs_notices_of_its_tries_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def unreachable(*_: Any, **__: Any) -> str:
        heard.append(NOTICES.isEnabledFor(logging.WARNING))
        raise errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", unreachable)
    before = NOTICES.isEnabledFor(logging.WARNING)
    with pytest.raises(ModelError, match="hub cannot be reached"):
        locate(model())
    assert heard == [False]
    assert NOTICES.isEnabledFor(logging.WARNING) is before is True


@pytest.mark.parametrize(
    ("repo", "numbers"),
    [
        (SD35, 2_243_171_520),
        ("black-forest-labs/FLUX.1-dev", 11_901_408_320),
        ("black-forest-labs/FLUX.2-klein-base-4B", 3_875_544_576),
        ("Tongyi-MAI/Z-Image", 6_154_908_736),
        ("Qwen/Qwen-Image", 20_430_401_088),
    ],
)
def test_the_shipped_config_files_give_a_transformer_of_the_published_size(repo: str, numbers: int) -> None:
    backbone = hollow_backbone(ModelConfig(path=str(known_configs(repo))), within=FakeTensorMode())
    assert sum(each.numel() for each in backbone.transformer.parameters()) == numbers


def test_a_repository_with_the_fp16_variant_alone_is_downloaded_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["model_index.json", "vae/config.json", "vae/w.fp16.safetensors", "text_encoder/config.json"]
    names += ["text_encoder/w.safetensors", "text_encoder/w.fp16.safetensors"]

    def download(repo: str, *, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        chosen = filter_repo_objects(names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for name in chosen:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model_folder(REPO, None, ("vae", "text_encoder"))
    assert {path.parent.name for path in tmp_path.rglob("*.fp16.safetensors")} == {"vae"}
