"""A LoRA that is refused as a start is converted as docs/models.md or the message says, and has the same effect."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, FluxPipeline, StableDiffusion3Pipeline
from peft import LoraConfig as PeftConfig
from peft import get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

from flow.adapter.lora_file import read_foreign_lora
from flow.maths.noise import normal
from protocol.errors import ModelError
from tests.support.paths import ROOT
from tests.support.worlds.tiny_models import write_flux

LINES = re.search(
    r"^ {4}pipeline\.load_lora_weights\(\"style.*?layers\)$", (ROOT / "docs/models.md").read_text(), re.M | re.S
)
RANK = 4


def sd3(folder: Path) -> DiffusionPipeline:
    lacking = dict.fromkeys(("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"))
    return StableDiffusion3Pipeline.from_pretrained(folder, **lacking)


def convert(pipeline: DiffusionPipeline, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Run the lines of the page beside a `style.safetensors`."""
    assert LINES
    monkeypatch.chdir(folder)
    exec(re.sub(r"^ {4}", "", LINES[0], flags=re.MULTILINE), {"pipeline": pipeline})


def effects(path: Path) -> dict[str, torch.Tensor]:
    """What a LoRA adds to each module's weight."""
    arrays, alpha = read_foreign_lora(str(path))
    held = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {
        name.removeprefix("transformer.").removesuffix(".lora_A.weight"): held[name.replace("lora_A", "lora_B")]
        @ down
        * ((alpha or len(down)) / len(down))
        for name, down in held.items()
        if ".lora_A." in name
    }


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, effect in expected.items():
        torch.testing.assert_close(found[name], effect)


def test_kohya_s_format_of_flux_is_converted_by_the_shown_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    down, up = normal("down", shape=(RANK, 32)), normal("up", shape=(96, RANK))
    beside = {f"double_blocks_0_{part}_attn_proj": (down + 1, up[:32]) for part in ("img", "txt")}
    tensors = {}
    for module, (a, b) in {"double_blocks_0_img_attn_qkv": (down, up), **beside}.items():
        names = ("lora_down.weight", "lora_up.weight", "alpha")
        held = zip(names, (a.clone(), b.clone(), torch.tensor(2.0)), strict=True)
        tensors |= {f"lora_unet_{module}.{name}": tensor for name, tensor in held}
    save_file(tensors, tmp_path / "style.safetensors")
    with pytest.raises(ModelError, match=r"got tensor lora_unet_.*as docs/models\.md shows"):
        read_foreign_lora(str(tmp_path / "style.safetensors"))
    convert(FluxPipeline.from_pretrained(write_flux(tmp_path / "flux")), monkeypatch, tmp_path)
    block, scale = "transformer_blocks.0.attn", 2 / RANK
    expected = {f"{block}.to_{part}": up[32 * n : 32 * n + 32] @ down * scale for n, part in enumerate("qkv")}
    expected |= {f"{block}.{name}": up[:32] @ (down + 1) * scale for name in ("to_out.0", "to_add_out")}
    require_equal(effects(tmp_path / "folder"), expected)


@pytest.mark.parametrize("options", [{"use_rslora": True}, {"alpha_pattern": {"attn.to_q": 3}}], ids=str)
def test_other_scales_are_converted_by_the_shown_lines(
    tiny_sd3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    model = lora_of(tiny_sd3, **options)
    tensors = {name.removeprefix("base_model.model."): held for name, held in get_peft_model_state_dict(model).items()}
    StableDiffusion3Pipeline.save_lora_weights(
        str(tmp_path),
        transformer_lora_layers=tensors,
        transformer_lora_adapter_metadata=model.peft_config["default"].to_dict(),
        weight_name="style.safetensors",
    )
    with pytest.raises(ModelError):
        read_foreign_lora(str(tmp_path / "style.safetensors"))
    convert(sd3(tiny_sd3), monkeypatch, tmp_path)
    require_equal(effects(tmp_path / "folder"), added(model))


def test_rslora_in_peft_s_format_starts_after_what_the_message_says(tiny_sd3: Path, tmp_path: Path) -> None:
    model = lora_of(tiny_sd3, use_rslora=True)
    model.save_pretrained(str(tmp_path))
    with pytest.raises(ModelError, match=r"without use_rslora, with its alpha multiplied by sqrt\(rank\)"):
        read_foreign_lora(str(tmp_path))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config |= {"use_rslora": False, "lora_alpha": config["lora_alpha"] * math.sqrt(RANK)}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    require_equal(effects(tmp_path), added(model))


def test_pissa_starts_after_peft_s_conversion(tiny_sd3: Path, tmp_path: Path) -> None:
    model = lora_of(tiny_sd3, init_lora_weights="pissa")
    base = dict(transformer_of(tiny_sd3).named_parameters())
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(str(tmp_path / "initial"))
    model.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter += 0.1 * normal(name, shape=tuple(parameter.shape))
    model.save_pretrained(str(tmp_path / "pissa"))
    with pytest.raises(ModelError, match="path_initial_model_for_weight_conversion"):
        read_foreign_lora(str(tmp_path / "pissa"))
    model.save_pretrained(str(tmp_path / "plain"), path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    whole = {
        name: held.get_base_layer().weight + held.get_delta_weight("default") for name, held in layers(model).items()
    }
    require_equal(
        effects(tmp_path / "plain"), {name: weight - base[f"{name}.weight"] for name, weight in whole.items()}
    )


def transformer_of(folder: Path) -> Any:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel.from_pretrained(folder, subfolder="transformer")


def lora_of(folder: Path, **options: Any) -> Any:
    """A LoRA of PEFT on two kinds of modules, all of its tensors random unless it has a start of its own."""
    given = {"init_lora_weights": False} | options
    config = PeftConfig(r=RANK, lora_alpha=12, target_modules=["attn.to_q", "attn.to_k"], **given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(transformer_of(folder), config)


def layers(model: Any) -> dict[str, Any]:
    """The modules that have the LoRA."""
    held = model.base_model.model.named_modules()
    return {name: module for name, module in held if hasattr(module, "get_delta_weight")}


def added(model: Any) -> dict[str, torch.Tensor]:
    """What PEFT adds to each module's weight."""
    return {name: module.get_delta_weight("default").detach() for name, module in layers(model).items()}
