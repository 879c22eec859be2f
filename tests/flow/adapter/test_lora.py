"""The adapter: what it changes, what it refuses, and that diffusers loads the file it is written to."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors import safe_open

from flow.adapter.lora import Lora
from flow.adapter.lora_file import read_lora, write_lora
from flow.maths.noise import normal
from flow.models.contract import Backbone
from flow.models.families import SD3
from flow.models.load import load_backbone
from protocol.config.model import LoraConfig, ModelConfig
from protocol.errors import CheckpointError, ContractError, ModelError
from protocol.ground.files import ADAPTER_FILE
from protocol.messages import Adapter, digest_of

CONFIG = SD3.adapter(LoraConfig(rank=4, alpha=12))


def fresh(tiny_sd3: Path) -> Backbone:
    return load_backbone(ModelConfig(path=str(tiny_sd3), max_sequence_length=2))


def answer(backbone: Backbone) -> torch.Tensor:
    with torch.no_grad():
        return backbone.velocity(
            normal("x", shape=(2, 4, 8, 8)),
            torch.tensor([0.9, 0.4]),
            backbone.encode("a red circle").repeat(2),
        )


def random_weights(lora: Lora, version: int = 3) -> Adapter:
    """Every tensor random and non-zero."""
    arrays = {name: 0.3 * normal(name, shape=tuple(p.shape)).numpy() for name, p in lora.parameters.items()}
    return Adapter(version=version, arrays=arrays, digest=digest_of(arrays))


def test_a_fresh_adapter_changes_nothing_bitwise(tiny_sd3: Path) -> None:
    backbone = fresh(tiny_sd3)
    before = answer(backbone)
    lora = Lora(backbone.transformer, CONFIG, seed=1)
    assert torch.equal(answer(backbone), before)
    assert all(bool(p.any()) == ("lora_A" in name) for name, p in lora.parameters.items())


def test_every_target_takes_the_adapter_and_nothing_else_is_trained(tiny_sd3: Path) -> None:
    backbone = fresh(tiny_sd3)
    lora = Lora(backbone.transformer, CONFIG, seed=1)
    weights = lora.export(version=0)
    modules = {name.rsplit(".lora_", 1)[0] for name in weights.arrays}
    expected = {
        f"transformer.transformer_blocks.{block}.{target}"
        for block in (0, 1)
        for target in CONFIG.targets
        if (block, target) != (1, "attn.to_add_out")
    }
    assert modules == expected
    assert len(weights.arrays) == 2 * len(expected)
    assert all(array.dtype == np.float32 for array in weights.arrays.values())
    trained = {id(p) for p in backbone.transformer.parameters() if p.requires_grad}
    assert trained == {id(p) for p in lora.parameters.values()}


def test_equal_seeds_give_equal_adapters_and_leave_the_global_generator_alone(tiny_sd3: Path) -> None:
    state = torch.random.get_rng_state()
    first, second, third = (Lora(fresh(tiny_sd3).transformer, CONFIG, seed=s).export(version=0) for s in (5, 5, 6))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.digest == second.digest != third.digest


def test_targets_that_name_no_module_are_a_model_error(tiny_sd3: Path) -> None:
    with pytest.raises(ModelError, match="no module matches"):
        Lora(fresh(tiny_sd3).transformer, SD3.adapter(LoraConfig(targets=("attention.query",))), seed=0)


def test_loading_gives_the_exporting_policy_s_velocity_bitwise(tiny_sd3: Path) -> None:
    learner, rollout = fresh(tiny_sd3), fresh(tiny_sd3)
    source, target = Lora(learner.transformer, CONFIG, seed=1), Lora(rollout.transformer, CONFIG, seed=2)
    weights = random_weights(source)
    assert source.load(weights) == weights.digest
    assert not torch.allclose(answer(learner), answer(rollout), atol=1e-3)
    exported = source.export(version=4)
    assert target.load(exported) == exported.digest == weights.digest
    assert torch.equal(answer(learner), answer(rollout))


def test_an_export_is_a_copy(tiny_sd3: Path) -> None:
    lora = Lora(fresh(tiny_sd3).transformer, CONFIG, seed=1)
    exported = lora.export(version=0)
    before = digest_of(exported.arrays)
    lora.load(random_weights(lora))
    assert digest_of(exported.arrays) == before == exported.digest


def test_the_digest_changes_with_one_number_one_name_and_one_shape() -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(2, np.float32)}
    base = digest_of(arrays)
    changed = {**arrays, "b": np.array([1, np.nextafter(np.float32(1), np.float32(2))], np.float32)}
    assert digest_of(dict(reversed(arrays.items()))) == base
    assert digest_of({**arrays, "a": np.asfortranarray(arrays["a"])}) == base
    others = [
        changed,
        {"a": arrays["a"], "c": arrays["b"]},
        {**arrays, "a": arrays["a"].reshape(3, 2)},
        {"a": arrays["a"]},
    ]
    assert len({base, *(digest_of(other) for other in others)}) == 5


def test_other_names_shapes_or_bytes_are_refused(tiny_sd3: Path) -> None:
    lora = Lora(fresh(tiny_sd3).transformer, CONFIG, seed=1)
    weights = random_weights(lora)
    name = next(iter(weights.arrays))
    without = {n: a for n, a in weights.arrays.items() if n != name}
    with pytest.raises(ContractError, match="must name the tensors of this model"):
        lora.load(replace(weights, arrays=without))
    with pytest.raises(ContractError, match=r"must be \[4, 16\], got \[16, 4\]"):
        lora.load(replace(weights, arrays={**weights.arrays, name: weights.arrays[name].T}))
    with pytest.raises(ContractError, match="must have digest"):
        lora.load(replace(weights, arrays={**weights.arrays, name: weights.arrays[name] + 1}))


def test_the_written_file_gives_a_plain_pipeline_the_policy_s_velocity(tiny_sd3: Path, tmp_path: Path) -> None:
    backbone = fresh(tiny_sd3)
    lora = Lora(backbone.transformer, CONFIG, seed=1)
    untrained = answer(backbone)
    weights = random_weights(lora)
    lora.load(weights)
    write_lora(tmp_path, weights, CONFIG)
    pipeline = StableDiffusion3Pipeline.from_pretrained(tiny_sd3, text_encoder_3=None, tokenizer_3=None)
    pipeline.load_lora_weights(tmp_path)
    with torch.no_grad():
        output = pipeline.transformer(
            hidden_states=normal("x", shape=(2, 4, 8, 8)),
            timestep=1000 * torch.tensor([0.9, 0.4]),
            return_dict=False,
            **backbone.encode("a red circle").repeat(2).tensors,
        )[0]
    mine = answer(backbone)
    assert (output - mine).norm() < 1e-5 * mine.norm(), "peft does not merge"
    assert not torch.allclose(output, untrained, atol=1e-2)
    adapters = pipeline.transformer.peft_config
    assert [(each.r, each.lora_alpha) for each in adapters.values()] == [(4, 12)]


def test_the_file_round_trips_bitwise_and_equal_weights_give_equal_bytes(tiny_sd3: Path, tmp_path: Path) -> None:
    weights = random_weights(Lora(fresh(tiny_sd3).transformer, CONFIG, seed=1))
    folders = [tmp_path / "one", tmp_path / "two"]
    reordered = replace(weights, arrays=dict(reversed(weights.arrays.items())))
    for folder, each in zip(folders, (weights, reordered), strict=True):
        folder.mkdir()
        write_lora(folder, each, CONFIG)
    assert (folders[0] / ADAPTER_FILE).read_bytes() == (folders[1] / ADAPTER_FILE).read_bytes()
    held = read_lora(folders[0], version=3)
    assert held.digest == weights.digest
    assert held.version == 3


def test_the_header_names_rank_alpha_and_targets(tiny_sd3: Path, tmp_path: Path) -> None:
    write_lora(tmp_path, random_weights(Lora(fresh(tiny_sd3).transformer, CONFIG, seed=1)), CONFIG)
    with safe_open(tmp_path / ADAPTER_FILE, framework="numpy") as file:
        adapter = json.loads(file.metadata()["lora_adapter_metadata"])
    assert adapter["transformer.r"] == 4
    assert adapter["transformer.lora_alpha"] == 12
    assert adapter["transformer.target_modules"] == list(CONFIG.targets)


def test_a_damaged_or_missing_file_is_a_checkpoint_error(tiny_sd3: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_lora(tmp_path, version=0)
    path = write_lora(tmp_path, random_weights(Lora(fresh(tiny_sd3).transformer, CONFIG, seed=1)), CONFIG)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_lora(tmp_path, version=0)


@pytest.mark.parametrize("where", ["folder", "file"])
def test_an_adapter_in_peft_s_own_format_starts_a_training(tiny_sd3: Path, tmp_path: Path, where: str) -> None:
    from diffusers import SD3Transformer2DModel
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    transformer = SD3Transformer2DModel.from_pretrained(tiny_sd3, subfolder="transformer")
    config = PeftConfig(r=4, lora_alpha=12, target_modules=list(CONFIG.targets or ()), init_lora_weights=False)
    model = get_peft_model(transformer, config)  # pyright: ignore[reportArgumentType]
    model.save_pretrained(str(tmp_path / "theirs"))
    lora = Lora(fresh(tiny_sd3).transformer, CONFIG, seed=0)
    lora.start_from(str(tmp_path / "theirs" / ("adapter_model.safetensors" if where == "file" else "")), CONFIG)
    theirs = {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}
    assert len(theirs) == len(lora.parameters)
    for name, tensor in theirs.items():
        ours = name.replace("base_model.model.", "transformer.").replace(".default.", ".")
        assert torch.equal(lora.parameters[ours], tensor)
    with pytest.raises(ModelError, match="rank .4. and alpha 12.0: set model.lora.rank"):
        lora.start_from(str(tmp_path / "theirs"), CONFIG.model_copy(update={"alpha": 8}))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_rslora": True}, "must have the scale alpha / rank, got use_rslora"),
        ({"alpha_pattern": {"attn.to_q": 3}}, r"must have one alpha, got \[3.0, 12.0\]: state 12"),
    ],
)
@pytest.mark.parametrize("by", ["peft", "diffusers"])
def test_an_adapter_with_another_scale_is_refused(
    tiny_sd3: Path, tmp_path: Path, by: str, options: dict[str, Any], reason: str
) -> None:
    from diffusers import SD3Transformer2DModel
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, get_peft_model_state_dict

    transformer = SD3Transformer2DModel.from_pretrained(tiny_sd3, subfolder="transformer")
    config = PeftConfig(r=4, lora_alpha=12, target_modules=list(CONFIG.targets or ()), **options)
    model = get_peft_model(transformer, config)  # pyright: ignore[reportArgumentType]
    if by == "peft":
        model.save_pretrained(str(tmp_path))
    else:
        tensors = get_peft_model_state_dict(model)
        StableDiffusion3Pipeline.save_lora_weights(
            str(tmp_path),
            transformer_lora_layers={name.removeprefix("base_model.model."): held for name, held in tensors.items()},
            transformer_lora_adapter_metadata=config.to_dict(),
        )
    lora = Lora(fresh(tiny_sd3).transformer, CONFIG, seed=0)
    with pytest.raises(ModelError, match=reason):
        lora.start_from(str(tmp_path), CONFIG)


def saved(tiny_sd3: Path, folder: Path, alphas: list[float | None]) -> Path:
    """A LoRA in diffusers' format with an alpha beside each of its modules, where the list has one."""
    from safetensors.torch import save_file

    lora = Lora(fresh(tiny_sd3).transformer, CONFIG, seed=0)
    tensors = {name: tensor.detach().clone() for name, tensor in lora.parameters.items()}
    modules = sorted({name.rpartition(".lora_")[0] for name in tensors})
    for number, module in enumerate(modules):
        if (alpha := alphas[number % len(alphas)]) is not None:
            tensors[f"{module}.alpha"] = torch.tensor(alpha)
    save_file(tensors, folder / "style.safetensors")
    return folder / "style.safetensors"


def test_an_alpha_below_one_starts_and_alphas_of_some_modules_only_do_not(tiny_sd3: Path, tmp_path: Path) -> None:
    config = LoraConfig.model_validate({**CONFIG.model_dump(), "alpha": 0.5})
    lora = Lora(fresh(tiny_sd3).transformer, config, seed=1)
    lora.start_from(str(saved(tiny_sd3, tmp_path, [0.5])), config)
    with pytest.raises(ModelError, match=r"alpha for all modules or for none, got none for transformer\.") as raised:
        lora.start_from(str(saved(tiny_sd3, tmp_path, [0.5, None])), config)
    assert ".alpha" in str(raised.value)
    assert LoraConfig(alpha=64).model_dump_json() == LoraConfig.model_validate({"alpha": 64}).model_dump_json()
    assert '"alpha":64,' in LoraConfig(alpha=64).model_dump_json(), "a whole number stays one in files"


def test_other_file_names_of_a_folder_and_a_way_to_convert_are_named(tiny_sd3: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved(tiny_sd3, tmp_path, [12.0])
    lora = Lora(fresh(tiny_sd3).transformer, CONFIG, seed=1)
    with pytest.raises(ModelError, match=rf"got style.safetensors: name one of them, such as {tmp_path}/style"):
        lora.start_from(str(tmp_path), CONFIG)
    other = tmp_path / "kohya.safetensors"
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(4, 8)}, other)
    with pytest.raises(ModelError, match=r"got tensor lora_unet_x.*as docs/models.md shows"):
        lora.start_from(str(other), CONFIG)
