"""The adapter on every family: defaults, the reference behind it, starting from a saved one, a plain pipeline."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from flow.adapter.lora import Lora
from flow.adapter.lora_file import write_lora
from flow.maths.noise import normal
from flow.models.contract import Backbone
from flow.models.families import FAMILIES, FLUX, SD3
from flow.models.load import load_backbone, open_embeddings
from flow.models.located import adapter_config
from flow.policy import FlowPolicy
from protocol.config.model import LoraConfig, ModelConfig
from protocol.config.sampling import SamplingConfig
from protocol.errors import ModelError
from protocol.ground.files import ADAPTER_FILE
from protocol.messages import Adapter, digest_of
from tests.support.worlds.pipelines import SIDES
from tests.support.worlds.tiny_models import write_flux, write_sd35
from tests.support.worlds.tiny_qwen import write_flux2_klein, write_qwen_image, write_qwen_image_21, write_z_image

WRITERS: dict[str, Callable[[Path], Path]] = {
    "sd35": write_sd35,
    "flux": write_flux,
    "flux2_klein": write_flux2_klein,
    "qwen_image": write_qwen_image,
    "qwen_image_21": write_qwen_image_21,
    "z_image": write_z_image,
}
SMALL = LoraConfig(rank=4, alpha=12)


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("models") / request.param)


def model_of(folder: Path, **settings: Any) -> ModelConfig:
    return ModelConfig(path=str(folder), max_sequence_length=6, height=16, width=16, lora=SMALL, **settings)


def loaded(folder: Path, **settings: Any) -> tuple[Backbone, Lora, LoraConfig]:
    model = model_of(folder, **settings)
    backbone, config = load_backbone(model), adapter_config(model)
    return backbone, Lora(backbone.transformer, config, seed=1), config


def random_weights(lora: Lora) -> Adapter:
    arrays = {name: 0.3 * normal(name, shape=tuple(p.shape)).numpy() for name, p in lora.parameters.items()}
    return Adapter(version=3, arrays=arrays, digest=digest_of(arrays))


def mean_of(backbone: Backbone, guidance: float = 1.0) -> torch.Tensor:
    policy = FlowPolicy(backbone, SamplingConfig(steps=4), guidance=guidance)
    latents = normal("x", shape=(2, *backbone.latent_shape))
    transition, _ = policy.transition(latents, 1, conditioning=policy.conditioning("a red circle", "blurry"))
    return transition.mean


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_may_be_on_a_convolution_too(tiny_sd3: Path, dtype: str) -> None:
    settings = {"rank": 4, "alpha": 12, "targets": ["pos_embed.proj"]}
    model = ModelConfig(path=str(tiny_sd3), max_sequence_length=6, dtype=dtype, lora=settings)
    backbone, config = load_backbone(model), adapter_config(model)
    lora = Lora(backbone.transformer, config, seed=1)
    before = mean_of(backbone)
    lora.load(random_weights(lora))
    assert not torch.equal(mean_of(backbone), before)


def test_families_have_their_own_defaults_and_a_config_overrides_each() -> None:
    assert (SD3.adapter(LoraConfig()).rank, SD3.adapter(LoraConfig()).alpha) == (32, 64)
    assert (FLUX.adapter(LoraConfig()).rank, FLUX.adapter(LoraConfig()).alpha) == (64, 128)
    assert "ff_context.net.2" in (FLUX.adapter(LoraConfig()).targets or ())
    own = LoraConfig(rank=2, targets=("attn.to_q",))
    assert FLUX.adapter(own) == LoraConfig(rank=2, alpha=128, targets=("attn.to_q",))


def test_every_default_target_binds_and_only_the_adapter_is_trained(folder: Path) -> None:
    backbone, lora, config = loaded(folder)
    for target in config.targets or ():
        assert any(f".{target}.lora_A" in name for name in lora.parameters)
    trained = {id(parameter) for parameter in backbone.transformer.parameters() if parameter.requires_grad}
    assert trained == {id(parameter) for parameter in lora.parameters.values()}


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_reference_is_the_base_model_and_a_fresh_adapter_equals_it_bitwise(folder: Path, guidance: float) -> None:
    base = mean_of(load_backbone(model_of(folder)), guidance).detach()
    backbone, lora, _ = loaded(folder)
    with torch.no_grad(), lora.adapter_disabled():
        reference = mean_of(backbone, guidance)
    assert torch.equal(reference, base)
    assert torch.equal(mean_of(backbone, guidance), reference), "KL is exactly 0 at start"
    lora.load(random_weights(lora))
    with torch.no_grad(), lora.adapter_disabled():
        assert torch.equal(mean_of(backbone, guidance), base)
    trained = mean_of(backbone, guidance)
    assert not torch.allclose(trained, base, atol=1e-3)


def test_training_goes_on_after_the_reference_was_asked(folder: Path) -> None:
    backbone, lora, _ = loaded(folder)
    with torch.no_grad(), lora.adapter_disabled():
        reference = mean_of(backbone)
    assert not reference.requires_grad
    (mean_of(backbone) - reference).square().sum().add(mean_of(backbone).sum()).backward()
    without = {name for name, parameter in lora.parameters.items() if "lora_B" in name and parameter.grad is None}
    # Nothing behind Qwen-Image's last attention leads from its text to its image.
    behind = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    last = {name for name in without if "transformer_blocks.1." in name and any(part in name for part in behind)}
    assert without == last
    assert len(without) == (3 if folder.name == "qwen_image" else 0)
    with pytest.raises(RuntimeError, match="inside"), lora.adapter_disabled():
        raise RuntimeError("inside")
    assert mean_of(backbone).requires_grad


@pytest.mark.parametrize("has_file_name", [True, False])
def test_a_run_starts_from_a_saved_adapter(folder: Path, tmp_path: Path, has_file_name: bool) -> None:
    backbone, lora, config = loaded(folder)
    weights = random_weights(lora)
    file = write_lora(tmp_path, weights, config)
    lora.load(weights)
    fresh_backbone, fresh, _ = loaded(folder)
    fresh.start_from(str(file if has_file_name else tmp_path), config)
    assert fresh.export(version=3).digest == weights.digest
    assert torch.equal(mean_of(fresh_backbone), mean_of(backbone))


def test_modules_that_a_saved_adapter_leaves_out_stay_fresh(folder: Path, tmp_path: Path) -> None:
    _, lora, config = loaded(folder)
    weights = random_weights(lora)
    part = {name: array for name, array in weights.arrays.items() if ".to_q." in name}
    write_lora(tmp_path, replace(weights, arrays=part), config)
    before = lora.export(version=0).arrays
    lora.start_from(str(tmp_path), config)
    after = lora.export(version=0).arrays
    for name, array in after.items():
        assert np.array_equal(array, part.get(name, before[name]))


def test_a_saved_adapter_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    _, lora, config = loaded(folder)
    with pytest.raises(ModelError, match="model.lora.start .* cannot be read"):
        lora.start_from(str(tmp_path), config)
    write_lora(tmp_path, random_weights(lora), config)
    with pytest.raises(ModelError, match=r"has rank \[4\] and alpha 12.0: set model.lora.rank"):
        lora.start_from(str(tmp_path), config.model_copy(update={"alpha": 8}))
    with pytest.raises(ModelError, match=r"has rank \[4\]"):
        lora.start_from(str(tmp_path), config.model_copy(update={"rank": 8}))
    bare = {**random_weights(lora).arrays}
    save_file(bare, tmp_path / ADAPTER_FILE)
    with pytest.raises(ModelError, match=r"has rank \[4\] and alpha 4: set"):
        lora.start_from(str(tmp_path), config)
    wide = {name: np.repeat(array, 2, axis=int("lora_A" in name)) for name, array in bare.items()}
    save_file(wide, tmp_path / ADAPTER_FILE)
    with pytest.raises(ModelError, match=r"belongs to another model: adapter tensor .* must be"):
        lora.start_from(str(tmp_path), config.model_copy(update={"alpha": 4}))
    foreign = {"transformer.proj_out.lora_A.weight": np.zeros((4, 4), np.float32)}
    save_file(foreign, tmp_path / ADAPTER_FILE)
    with pytest.raises(
        ModelError, match=r"must name modules that model.lora.targets names too, got transformer.proj_out"
    ):
        lora.start_from(str(tmp_path), config)
    save_file({"unet.down.weight": np.zeros(1, np.float32)}, tmp_path / ADAPTER_FILE)
    with pytest.raises(ModelError, match="in diffusers' format, got tensor unet.down.weight"):
        lora.start_from(str(tmp_path), config)


def test_a_plain_pipeline_with_the_exported_adapter_predicts_what_our_policy_predicts(
    folder: Path, tmp_path: Path
) -> None:
    backbone, lora, config = loaded(folder)
    weights = random_weights(lora)
    lora.load(weights)
    write_lora(tmp_path, weights, config)
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, **SIDES[folder.name].parts(folder))
    untouched: Any = load_backbone(model_of(folder))
    pipeline.load_lora_weights(tmp_path)
    plain = type(untouched)(
        pipeline, model_of(folder), open_embeddings(model_of(folder), device="cpu"), device=torch.device("cpu")
    )
    theirs, mine = mean_of(plain), mean_of(backbone)
    assert (theirs - mine).norm() < 1e-5 * mine.norm(), "peft does not merge"
    assert not torch.allclose(theirs, mean_of(untouched), atol=1e-3)
    assert [(each.r, each.lora_alpha) for each in pipeline.transformer.peft_config.values()] == [(4, 12)]


def test_every_family_names_a_pipeline_of_diffusers_and_a_class_of_ours() -> None:
    from flow.models.load import backbone_class
    from flow.models.pipeline import PipelineBackbone

    for pipeline, family in FAMILIES.items():
        assert hasattr(diffusers, pipeline)
        assert issubclass(backbone_class(family), PipelineBackbone)
        assert backbone_class(family).family is family
