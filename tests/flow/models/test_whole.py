"""A model's parts are read whole or refused in one line, and headers alone refuse what loading refuses."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flow.models.load import load_backbone, open_embeddings, require_loadable
from flow.models.located import locate
from flow.models.parts import read_part
from protocol.config.model import ModelConfig
from protocol.errors import ModelError
from tests.support.worlds.tiny_models import write_sd35
from tests.support.worlds.tiny_qwen import write_qwen_image, write_z_image

WEIGHTS = {"transformer": "diffusion_pytorch_model.safetensors", "vae": "diffusion_pytorch_model.safetensors"}
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SD3.5's shape with its three text encoders."""
    return write_sd35(tmp_path_factory.mktemp("sound") / "sd35")


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sound, tmp_path / "model")


def check(model: ModelConfig) -> None:
    located = locate(model)
    assert located.sizes
    require_loadable(located)


def weights_of(part: str) -> str:
    return f"{part}/{WEIGHTS.get(part, 'model.safetensors')}"


def without(part: str, *names: str) -> Damage:
    return changed(part, lambda held: {name: tensor for name, tensor in held.items() if name not in names})


def with_more(part: str, name: str) -> Damage:
    return changed(part, lambda held: held | {name: torch.zeros(3)})


def shorter(part: str, name: str) -> Damage:
    return changed(part, lambda held: held | {name: held[name][:-1].clone()})


def changed(part: str, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / weights_of(part)
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return damage


def pickled_without(part: str, name: str) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / weights_of(part)
        torch.save({each: tensor for each, tensor in load_file(file).items() if each != name}, file.with_suffix(".bin"))
        file.unlink()

    return damage


def sharded_without(part: str, name: str) -> Damage:
    """Two files of weights and their index, which names a tensor that no file holds."""

    def damage(folder: Path) -> None:
        file = folder / weights_of(part)
        held = load_file(file)
        files = {each: f"{file.stem}-0000{1 + number % 2}-of-00002.safetensors" for number, each in enumerate(held)}
        for shard in set(files.values()):
            kept = {each: held[each] for each in held if files[each] == shard and each != name}
            save_file(kept, file.with_name(shard), metadata={"format": "pt"})
        file.with_name(f"{file.name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
        file.unlink()

    return damage


def cast(part: str, dtype: torch.dtype) -> Damage:
    """One weight in a dtype that means nothing without a scale."""

    def change(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = min(each for each in held if each.endswith(".weight"))
        return held | {name: held[name].to(dtype)}

    return changed(part, change)


def configured(file: str, **settings: Any) -> Damage:
    """Set keys of a JSON file; `...` removes one."""

    def damage(folder: Path) -> None:
        held = json.loads((folder / file).read_text()) | settings
        (folder / file).write_text(json.dumps({key: value for key, value in held.items() if value is not ...}))

    return damage


def cut(file: str) -> Damage:
    def damage(folder: Path) -> None:
        whole = (folder / file).read_bytes()
        (folder / file).write_bytes(whole[: len(whole) // 2])

    return damage


def removed(file: str) -> Damage:
    return lambda folder: (folder / file).unlink()


def few_words(folder: Path) -> None:
    """A tokenizer of the second CLIP whose vocabulary a library made up."""
    file = folder / "tokenizer_2" / "tokenizer.json"
    tree = json.loads(file.read_text())
    marks = ("<|startoftext|>", "<|endoftext|>")
    tree["model"]["vocab"] = {mark: number for number, mark in enumerate(marks)}
    tree["added_tokens"] = [each | {"id": marks.index(each["content"])} for each in tree["added_tokens"]]
    tree["post_processor"] = None
    file.write_text(json.dumps(tree))


PROJECTION = "text_model.encoder.layers.0.self_attn.q_proj"
FAULTS: dict[str, tuple[Damage, str]] = {
    "encoder lacks one": (
        without("text_encoder", f"{PROJECTION}.weight"),
        rf"text_encoder of .*model .* 1 missing, such as {PROJECTION}.weight",
    ),
    "encoder lacks two": (
        without("text_encoder_2", "text_projection.weight", f"{PROJECTION}.bias"),
        rf"text_encoder_2 of .* 2 missing, such as {PROJECTION}.bias",
    ),
    "encoder has more": (with_more("text_encoder", "extra.weight"), "text_encoder of .* 1 unknown.*extra"),
    "encoder of another shape": (
        shorter("text_encoder_3", "encoder.final_layer_norm.weight"),
        "text_encoder_3 of .* 1 of another shape, such as encoder.final_layer_norm.weight",
    ),
    "encoder cut": (cut("text_encoder/model.safetensors"), "text_encoder of .* cannot be loaded: .*not fully covered"),
    "encoder quantised": (
        configured("text_encoder_3/config.json", quantization_config={"quant_method": "bitsandbytes"}),
        "text_encoder_3 of .* got quantization_config bitsandbytes: .*model.quantize=nf4",
    ),
    "encoder has no partner": (configured("model_index.json", tokenizer_3=[None, None]), "got no tokenizer_3"),
    "tokenizer has no file": (removed("tokenizer_2/tokenizer.json"), "tokenizer_2 of .* must hold tokenizer.json or"),
    "tokenizer has few words": (few_words, "tokenizer_2 of .* got 2 for 190 rows"),
    "tokenizer reads too far": (
        configured("tokenizer/tokenizer_config.json", model_max_length=77),
        "tokenizer of .* at most the model's 24 positions .* got 77",
    ),
    "transformer lacks one": (
        without("transformer", "proj_out.bias"),
        "transformer of .* missing, such as proj_out.bias",
    ),
    "transformer has more": (with_more("transformer", "extra"), "transformer of .* 1 unknown, such as extra"),
    "transformer of another shape": (shorter("transformer", "proj_out.bias"), "transformer of .*proj_out.bias"),
    "transformer cut": (cut(weights_of("transformer")), "transformer of .* cannot be loaded: "),
    "transformer lacks a key": (
        configured("transformer/config.json", num_layers=...),
        "transformer of .* missing,",
    ),
    "transformer quantised": (
        configured("transformer/config.json", quantization_config={"quant_method": "gguf"}),
        "transformer of .* got quantization_config gguf",
    ),
    "transformer in 8 bits": (
        cast("transformer", torch.int8),
        "transformer of .* got I8 for .*weight and no quantization_config: .*model.quantize=nf4",
    ),
    "encoder in float8": (cast("text_encoder", torch.float8_e4m3fn), "text_encoder of .* got F8_E4M3 for .*weight and"),
    "vae in bytes": (cast("vae", torch.uint8), "vae of .* got U8 for .*weight and no quantization_config"),
    "transformer is absent": (removed(weights_of("transformer")), "transformer of .*model "),
    "vae lacks one": (without("vae", "decoder.conv_out.bias"), "vae of .* missing, such as decoder.conv_out.bias"),
    "vae pickled": (
        pickled_without("vae", "decoder.conv_out.bias"),
        "vae of .* 1 missing, such as decoder.conv_out.bias",
    ),
    "vae in shards": (
        sharded_without("vae", "decoder.conv_out.bias"),
        "vae of .* 1 missing, such as decoder.conv_out.bi",
    ),
    "vae has no shift": (configured("vae/config.json", shift_factor=None), "vae of .* must name shift_factor"),
    "scheduler of another class": (
        configured("model_index.json", scheduler=["diffusers", "UniPCMultistepScheduler"]),
        "scheduler of .* must be a FlowMatchEulerDiscreteScheduler, got UniPCMultistepScheduler",
    ),
    "scheduler's config of another class": (
        configured("scheduler/scheduler_config.json", _class_name="FlowMatchHeunDiscreteScheduler"),
        "scheduler of .* got FlowMatchHeunDiscreteScheduler",
    ),
    "scheduler has no shift": (
        configured("scheduler/scheduler_config.json", shift=None),
        "scheduler of .*model must have a number as shift, got null",
    ),
    "index names no vae": (configured("model_index.json", vae=...), "must name transformer, vae, .*got no vae"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_folder_that_is_not_whole_is_refused_by_its_headers_too(name: str, model: Path, tmp_path: Path) -> None:
    damage, message = FAULTS[name]
    damage(model)
    config = ModelConfig(path=str(model), max_sequence_length=4)
    for read in (check, load_backbone):
        with pytest.raises(ModelError, match=message) as caught:
            read(config)
        assert "\n" not in str(caught.value)
    if re.match("encoder|tokenizer", name):
        cache = tmp_path / "embeddings"
        with pytest.raises(ModelError, match=message):
            open_embeddings(config.model_copy(update={"embedding_cache": str(cache)}), device="cpu").of("a cat")
        assert not cache.exists()


def test_an_outline_takes_no_memory(sound: Path) -> None:
    for part in ("transformer", "vae", "text_encoder", "text_encoder_3"):
        assert {
            each.device.type
            for each in read_part(locate(ModelConfig(path=str(sound))), part, is_outline=True).parameters()
        } == {"meta"}


def test_what_a_published_file_holds_besides_is_ignored(model: Path, tmp_path: Path) -> None:
    changed("text_encoder", lambda held: held | {"text_model.embeddings.position_ids": torch.arange(24)[None]})(model)
    changed("text_encoder_3", lambda held: held | {"encoder.embed_tokens.weight": held["shared.weight"].clone()})(model)
    check(ModelConfig(path=str(model)))
    z_image = write_z_image(tmp_path / "z")
    with_more("text_encoder", "lm_head.weight")(z_image)
    with pytest.raises(ModelError, match="unknown, such as lm_head.weight"):
        check(ModelConfig(path=str(z_image)))
    configured("text_encoder/config.json", architectures=["Qwen3ForCausalLM"])(z_image)  # which it was saved by
    check(ModelConfig(path=str(z_image)))


def test_weights_of_the_fp16_variant_alone_are_read(model: Path, sound: Path) -> None:
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        file = model / weights_of(part)
        file.rename(file.with_name(file.name.replace(".safetensors", ".fp16.safetensors")))
    config = ModelConfig(path=str(model), max_sequence_length=4)
    check(config)
    plain = load_backbone(config.model_copy(update={"path": str(sound)})).encode("a cat")
    for name, tensor in load_backbone(config).encode("a cat").tensors.items():
        assert torch.equal(tensor, plain.tensors[name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents_std": None}, "vae of .*q must have 4 numbers as latents_std .*, got 0"),
        ({"latents_mean": ...}, "vae of .*q must have 4 numbers as latents_mean .*, got 16"),
        ({"temperal_downsample": None}, "block_out_channels, got none"),
    ],
)
def test_a_vae_of_qwen_image_names_its_latents_sizes(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_qwen_image(tmp_path / "q")
    configured("vae/config.json", **change)(folder)
    with pytest.raises(ModelError, match=message):
        check(ModelConfig(path=str(folder)))


def test_a_tokenizer_without_its_chat_template_is_refused(tmp_path: Path) -> None:
    folder = write_z_image(tmp_path / "z")
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="tokenizer of .*z must have a chat template, got none"):
        check(ModelConfig(path=str(folder)))


def test_one_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="model.safetensors is one file"):
        check(ModelConfig(path=str(tmp_path / "model.safetensors")))


def test_a_prompt_may_not_be_longer_than_z_image_has_positions(tmp_path: Path, tiny_config: Any) -> None:
    # 512 positions: 480 of the prompt, filled to a multiple of 32 and numbered from 1, then one of the image
    path = str(write_z_image(tmp_path / "z"))
    fitting, longer = (tiny_config(model={"path": path, "max_sequence_length": most}) for most in (480, 481))
    locate(fitting.model).require_sizes(fitting)
    with pytest.raises(ModelError, match="model.max_sequence_length must be at most 480 .* got 481"):
        locate(longer.model).require_sizes(longer)


def test_a_lora_to_start_from_is_checked_by_its_header(sound: Path, tmp_path: Path) -> None:
    def asked(**lora: Any) -> ModelConfig:
        held = {"rank": 2, "alpha": 2, "targets": ["attn.to_q"], "start": str(tmp_path / "adapter_model.safetensors")}
        return ModelConfig.model_validate({"path": str(sound), "lora": held | lora})

    module = "transformer_blocks.0.attn.to_q"
    shapes = {f"base_model.model.{module}.lora_A.weight": (2, 16), f"base_model.model.{module}.lora_B.weight": (16, 2)}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "adapter_model.safetensors")
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({"lora_alpha": 2, "init_lora_weights": True}))
    check(asked())
    for start, message in (
        ({"start": str(tmp_path / "no.safetensors")}, "cannot be read: No such"),
        ({"rank": 4}, "rank"),
    ):
        with pytest.raises(ModelError, match=f"model.lora.start .*{message}"):
            check(asked(**start))
    for changes_base in ("pissa", "pissa_niter_4", "olora", "loftq", "corda"):
        settings.write_text(json.dumps({"lora_alpha": 2, "init_lora_weights": changes_base}))
        with pytest.raises(ModelError, match=f"model.lora.start .* got init_lora_weights '{changes_base}'"):
            check(asked())
    renamed = (tmp_path / "adapter_model.safetensors").rename(tmp_path / "mine.safetensors")
    with pytest.raises(ModelError, match="got init_lora_weights 'corda'"):
        check(asked(start=str(renamed)))
    settings.unlink()
    with pytest.raises(ModelError, match=r"model.lora.start .* cannot be read: .*adapter_config.json"):
        check(asked(start=str(renamed)))
