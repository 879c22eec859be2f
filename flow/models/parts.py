"""The parts of a pipeline: each is read from its own folder, whole or refused in one line.

An outline of a part comes from config files and the headers of its weights: a model without memory, refused where the
part itself would be refused.
"""

import inspect
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from shutil import copytree
from types import MappingProxyType, SimpleNamespace
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import safe_open

from flow.models.families import Family
from flow.models.hub import INDEX, is_known, is_on_hub
from flow.models.located import IMAGE_VAES, Located, read_settings
from protocol.errors import ModelError
from protocol.ground.pretrained import (
    AGAIN,
    load_tokenizer,
    load_whole,
    loaded,
    require_plain_weights,
    require_tensors,
    require_vocabulary,
)

STEMS = {"transformers": "model", "diffusers": "diffusion_pytorch_model"}
"""How each library names the files of a part's weights."""
ENCODER = "text_encoder"
OPTIONAL = {"text_encoder_3", "tokenizer_3"}
"""SD3's T5, without which its pipeline works too."""
PROCESSOR = "processor"
"""A part that holds a tokenizer beside processors of images and videos."""
UNQUANTISED = "use the unquantised model and model.quantize=nf4"


def read_part(
    located: Located, part: str, *, dtype: torch.dtype | None = None, is_outline: bool = False, **options: Any
) -> Any:
    """Read a part of a model, such as `transformer` or `text_encoder`.

    An outline is read from headers only; its weights stay on the device `meta`. `options` go to `from_pretrained`.

    Raises:
        ModelError: it cannot be read, or it lacks tensors of its class or has others.
    """
    kind = part_class(located, part)
    options |= {"dtype": dtype} if dtype else {}
    return read_model(kind, located.folder / part, _what(located, part), is_outline=is_outline, **options)


def read_model(kind: Any, folder: Path, what: str, *, is_outline: bool = False, **options: Any) -> Any:
    """Read a model of a class from its own folder, like `read_part`; `what` names it in errors."""
    require_plain_weights(folder, what=what, error=ModelError, remedy=UNQUANTISED)
    read_settings(folder / "config.json")
    options |= {"local_files_only": True, "variant": _variant(folder, _stem(kind))}
    if is_outline and _stem(kind) == STEMS["diffusers"]:
        model = _outline(kind, folder, what)
    else:
        options |= {"device_map": "meta"} if is_outline else {}
        model = load_whole(kind.from_pretrained, folder, what=what, error=ModelError, **options)
    if kind.__name__ in IMAGE_VAES:
        unknown = [key for key in ("scaling_factor", "shift_factor") if model.config.get(key) is None]
        if unknown:
            raise ModelError(
                f"{what} must name {unknown[0]} in its config.json, got none, and the pipeline needs it to decode:"
                f" set it as in the model's release, or to {1 if unknown[0] == 'scaling_factor' else 0} if latents are"
                " decoded as they are"
            )
    channels = getattr(model.config, "z_dim", None)  # of Qwen-Image's VAEs
    for key in ("latents_mean", "latents_std") if channels else ():
        if len(model.config[key] or ()) != channels:
            raise ModelError(
                f"{what} must have {channels} numbers as {key} in its config.json, one for each channel, got"
                f" {len(model.config[key] or ())}: {AGAIN}"
            )
    return model


def read_tiny_decoder(located: Located, *, dtype: torch.dtype | None = None, is_outline: bool = False) -> Any:
    """Read the decoder that `model.tiny_decoder` names; None without one. See `read_part`."""
    from diffusers import AutoencoderTiny

    path, folder = located.model.tiny_decoder, located.tiny_decoder(is_whole=not is_outline)
    if path is None or folder is None or (is_outline and may_lack_weights(path, folder)):
        return None
    options = {"dtype": dtype} if dtype else {}
    what = f"model.tiny_decoder {path}"
    return read_model(AutoencoderTiny, folder, what, is_outline=is_outline, **options)


def read_text_parts(located: Located, *, dtype: torch.dtype | None = None, is_outline: bool = False) -> dict[str, Any]:
    """Read the tokenizers and text encoders that a model's index names, and check that each pair fits.

    An outline is read from headers only, without what `may_lack_weights`.

    Returns:
        The parts by name; None where the index names none. Of an image encoder nothing is read, since prompts are
        texts.

    Raises:
        ModelError: see `read_part`; or a tokenizer has another vocabulary than its encoder.
    """
    folder, parts = located.folder, dict[str, Any].fromkeys(located.family.text_parts)
    encoders = [part for part in parts if part.startswith(ENCODER)]
    tokenizers = [part for part in parts if is_tokenizer(part)][: len(encoders)]  # a processor stands for another one
    for encoder, tokenizer in zip(encoders, tokenizers, strict=True):
        lacking = [part for part in (encoder, tokenizer) if part not in located.parts]
        if lacking and OPTIONAL.isdisjoint(located.parts) and OPTIONAL.issuperset(lacking):
            continue
        if lacking and not is_known(folder):
            raise ModelError(
                f"model folder {folder} must name its text encoders and tokenizers in {INDEX}, got no {lacking[0]}"
            )
        if encoder not in lacking and not (is_outline and may_lack_weights(located.model.path, folder / encoder)):
            parts[encoder] = read_part(located, encoder, dtype=dtype, is_outline=is_outline)
        if tokenizer not in lacking:
            parts[tokenizer] = read_tokenizer(located, tokenizer)
            if parts[encoder] is not None:
                what = _what(located, tokenizer)
                require_vocabulary(parts[tokenizer], parts[encoder], what=what, error=ModelError)
    if located.family.reads_images and parts[PROCESSOR]:
        parts[PROCESSOR] = _image_processor(located, parts[PROCESSOR])
        parts["tokenizer"] = read_tokenizer(located, "tokenizer") if "tokenizer" in located.parts else None
    return parts


def is_tokenizer(part: str) -> bool:
    return part.startswith(("tokenizer", PROCESSOR))


def read_tokenizer(located: Located, part: str) -> Any:
    """Read a tokenizer of a model, such as `tokenizer_2`, or its processor's tokenizer.

    Raises:
        ModelError: a file is missing or cannot be read, or there is no chat template where prompts need one.
    """
    folder, what = located.folder / part, _what(located, part)
    if part == PROCESSOR:
        import transformers

        named = read_settings(folder / "tokenizer_config.json").get("tokenizer_class")
        kind = getattr(transformers, str(named), transformers.AutoTokenizer)
    else:
        kind = part_class(located, part)
    tokenizer = load_tokenizer(kind, folder, what=what, error=ModelError, local_files_only=True)
    if located.family.has_chat and not tokenizer.chat_template:
        raise ModelError(f"{what} must have a chat template, got none, such as chat_template.jinja: {AGAIN}")
    return tokenizer


def pipeline_of(located: Located, text_parts: Mapping[str, Any] = MappingProxyType({}), **parts: Any) -> Any:
    """Make a model's pipeline of parts that are read already, and of its scheduler.

    Args:
        text_parts: from `read_text_parts`; the pipeline has None for other text parts.

    Raises:
        ModelError: the scheduler cannot be read, or is of a class whose sigmas ours are not.
    """
    import diffusers

    located.require_scheduler()
    folder, name = located.folder, located.family.pipeline
    load, what = getattr(diffusers, name).from_pretrained, f"model folder {folder} as {name}"
    parts |= text_arguments(located.family, text_parts)
    if parts.get(PROCESSOR):
        parts[PROCESSOR].save_pretrained = lambda target, **_: copytree(folder / PROCESSOR, target, dirs_exist_ok=True)
    return loaded(load, folder, what=what, error=ModelError, local_files_only=True, **parts)


def text_arguments(family: Family, text_parts: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """Return a pipeline's arguments for its text parts; None for a part that is not read."""
    arguments = dict[str, Any].fromkeys(family.text_parts) | dict(text_parts)
    if PROCESSOR in arguments and not family.reads_images:
        arguments[PROCESSOR] = _processor_of(arguments[PROCESSOR])
    return arguments


def _processor_of(tokenizer: Any) -> Any:
    """Return a processor that reads texts only: the processors of images and videos beside it need torchvision.

    Without a tokenizer it answers what the pipeline asks when it is made.
    """
    from transformers import Qwen3VLProcessor

    def chat(messages: Any, **_: Any) -> list[list[int]]:
        return tokenizer.apply_chat_template([messages], return_dict=False) if tokenizer else [[]]

    processor: Any = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
    processor.tokenizer = tokenizer or SimpleNamespace(encode=lambda _: [0])
    processor.image_processor = processor.video_processor = None
    processor.apply_chat_template = chat
    return processor


def _image_processor(located: Located, tokenizer: Any) -> Any:
    """Return a processor that reads texts and, with Pillow, images; one that also reads videos needs torchvision."""
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor: Any = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.tokenizer, processor.video_processor, processor.chat_template = tokenizer, None, None
    processor.image_processor = loaded(
        Qwen2VLImageProcessorPil.from_pretrained,
        located.folder / PROCESSOR,
        what=_what(located, PROCESSOR),
        error=ModelError,
        local_files_only=True,
    )
    for kind in ("image", "video"):
        token = f"<|{kind}_pad|>"
        setattr(processor, f"{kind}_token", token)
        setattr(processor, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
    return processor


def part_class(located: Located, part: str) -> Any:
    """Import and return the class of a part, which `model_index.json` names.

    Raises:
        ModelError: the index names none, or one that diffusers and transformers do not have.
    """
    entry = located.index.get(part)
    is_named = isinstance(entry, list) and len(entry) == 2 and all(isinstance(word, str) for word in entry)
    library, name = entry if is_named else ("", "")
    kind = getattr(import_module(library), name, None) if library in STEMS else None
    if not inspect.isclass(kind):
        raise ModelError(f"{_what(located, part)} must be a class of diffusers or transformers in {INDEX}, got {entry}")
    return kind


def transformer_settings(located: Located) -> dict[str, Any]:
    """Return the config of the transformer, with the defaults of its class for keys that the file lacks."""
    parameters = inspect.signature(part_class(located, "transformer").__init__).parameters.values()
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    return defaults | located.transformer


def may_lack_weights(path: str, folder: Path) -> bool:
    """Tell whether a part's weights are not here yet and need not be: of a hub id, or of configs that we ship."""
    return (is_on_hub(path) or is_known(folder)) and not has_weights(folder)


def has_weights(folder: Path) -> bool:
    """Tell whether a part's folder holds all its weights, as far as their index or their one file says."""
    files = [file for stem in STEMS.values() for file in _files(folder, stem)]
    return all(file.exists() for file in files) if files else any(folder.glob("*.bin"))


def _outline(kind: Any, folder: Path, what: str) -> Any:
    """Make a model of diffusers without memory, and compare its tensors with the headers of its weights."""
    from accelerate import init_empty_weights

    files = _files(folder, STEMS["diffusers"]) or sorted(folder.glob(f"{STEMS['diffusers']}*.bin"))
    settings = loaded(kind.load_config, folder, what=what, error=ModelError, local_files_only=True)
    with init_empty_weights(include_buffers=True):  # SD3.5 numbers its positions with 0.9 GB
        model = loaded(kind.from_config, settings, what=what, error=ModelError)
    if not files:
        raise ModelError(f"{what} must hold its weights, got no {STEMS['diffusers']}.safetensors: download them")
    in_files: dict[str, torch.Tensor] = {}
    for file in files:
        in_files |= loaded(_header, file, what=f"{file.name} of the {what}", error=ModelError)
    model._fix_state_dict_keys_on_load(in_files)  # VAEs of older releases
    in_class = model.state_dict()
    loading_info = {
        "missing_keys": in_class.keys() - in_files.keys(),
        "unexpected_keys": in_files.keys() - in_class.keys(),
        "mismatched_keys": [
            (name,) for name in in_class.keys() & in_files.keys() if in_class[name].shape != in_files[name].shape
        ],
    }
    require_tensors(model, loading_info, what=what, error=ModelError)
    return model


def _header(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".bin":
        return torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
    with safe_open(file, framework="pt") as held:
        return {name: torch.empty(held.get_slice(name).get_shape(), device="meta") for name in held.keys()}  # noqa: SIM118


def _files(folder: Path, stem: str) -> list[Path]:
    """Return the files of a part's weights: the files that their index names, or the one file."""
    variant = _variant(folder, stem)
    index = folder / (f"{stem}.safetensors.index.{variant}.json" if variant else f"{stem}.safetensors.index.json")
    if index.exists():
        try:
            return sorted(
                {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return [index]  # no safetensors file, so that reading it names it
    one = folder / (f"{stem}.{variant}.safetensors" if variant else f"{stem}.safetensors")
    return [one] if one.exists() else []


def _variant(folder: Path, stem: str) -> str | None:
    """Return `fp16` if a part has weights in this variant only; None takes the plain ones."""
    plain = [f"{stem}.safetensors", f"{stem}.safetensors.index.json", "pytorch_model.bin", f"{stem}.bin"]
    halved = [f"{stem}.fp16.safetensors", f"{stem}.safetensors.index.fp16.json"]
    has_plain, has_half = (any((folder / name).exists() for name in names) for names in (plain, halved))
    return "fp16" if has_half and not has_plain else None


def _stem(kind: Any) -> str:
    return STEMS["diffusers" if kind.__module__.partition(".")[0] == "diffusers" else "transformers"]


def _what(located: Located, part: str) -> str:
    return f"{part} of model folder {located.folder}"
