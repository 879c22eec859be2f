"""Where a model is and what its config files say: found once, and passed on as a value.

This module does not import torch, so the process that starts a run stays light.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flow.models.families import FAMILIES, Family
from flow.models.hub import INDEX, config_folder, index_folder, is_on_hub, model_folder, tiny_decoder_folder
from protocol.config.model import LoraConfig, ModelConfig
from protocol.config.run import RunConfig
from protocol.errors import ModelError, PromptError, one_line
from protocol.ground.resources import resolve
from protocol.messages import Prompt
from protocol.prompts import check_each

SCHEDULER = "FlowMatchEulerDiscreteScheduler"
"""Class of the schedulers whose sigmas `flow.maths.schedule` computes."""
SCHEDULE_NUMBERS = "shift", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "num_train_timesteps"
"""Keys of its config that must not be null; the class has defaults for absent keys."""
CORE_PARTS = "transformer", "vae", "scheduler"
"""What every pipeline has."""
IMAGE_VAES = "AutoencoderKL", "AutoencoderTiny"
"""VAEs that a tiny decoder can replace: others pack their latents or decode them as the frames of a video."""
DISTILLED_NAMES = ("turbo", "schnell", "lightning", "hyper", "lcm")
"""Words in the names of distilled models."""
SIDE = 1024
"""Default side of an image in the families whose config files name none, in pixels."""
FILLED = 32
"""Z-Image fills a prompt to a multiple of this many tokens."""
PACK = 2
"""Side of a token in latents, in the families whose pipeline packs the latents."""
COMMIT = re.compile("[0-9a-f]{40}")
"""The name of a commit of the hub."""


@dataclass(frozen=True)
class Sizes:
    """Which images a model can make; all in pixels."""

    scale: int
    """Side of a latent."""
    token: int
    """Side of a token, of which height and width are multiples."""
    most: int | None
    """Largest height and width: where the position embeddings end; None without a limit."""

    def whole(self, side: int) -> int:
        """Cut a side to whole tokens, at least one."""
        return max(1, side // self.token) * self.token

    def require(self, height: int, width: int, *, names: tuple[str, str] = ("model.height", "model.width")) -> None:
        """Raise ModelError, with the keys `names`, unless the model can make images of this size in pixels."""
        both, got = " and ".join(names), f"got {height} and {width}"
        if height % self.token or width % self.token:
            raise ModelError(f"{both} must be multiples of {self.token}, {got}")
        if self.most and max(height, width) > self.most:
            raise ModelError(f"{both} must be at most {self.most} for this model's position embeddings, {got}")


@dataclass(frozen=True)
class Located:
    """A model and its folder. A config file is read when it is first needed; ModelError if it cannot be read."""

    model: ModelConfig
    family: Family
    index: Mapping[str, Any]
    """Content of `model_index.json`."""
    folder: Path
    """Holds a folder for each part. One in the hub's cache has weights only if the whole model was asked for."""

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the parts that the index names with library and class, such as `transformer`."""
        lists = {name: entry for name, entry in self.index.items() if isinstance(entry, list)}
        return tuple(name for name, entry in lists.items() if all(isinstance(word, str) for word in entry))

    @property
    def lora(self) -> LoraConfig:
        """`model.lora` with the family's defaults filled in."""
        return self.family.adapter(self.model.lora)

    @property
    def commit(self) -> str | None:
        """Commit of a hub id; for a folder, the revision as it is."""
        return commit_of(self.folder, self.model.revision) if is_on_hub(self.model.path) else self.model.revision

    @cached_property
    def transformer(self) -> dict[str, Any]:
        return read_settings(self.folder / "transformer" / "config.json")

    @cached_property
    def vae(self) -> dict[str, Any]:
        return read_settings(self.folder / "vae" / "config.json")

    def require_scheduler(self) -> Mapping[str, Any]:
        """Return the scheduler's config and the index's own sigmas; refuse another class, and null numbers."""
        settings = read_settings(self.folder / "scheduler" / "scheduler_config.json")
        _require_schedule_class(settings.get("_class_name", SCHEDULER), str(self.folder))
        if lacking := [key for key in SCHEDULE_NUMBERS if settings.get(key, 0) is None]:
            raise ModelError(
                f"the scheduler of model folder {self.folder} must have a number as {lacking[0]}, got null: set it to"
                " the number in the model's release"
            )
        return {**settings, "sample_sigmas": self.index.get("sample_sigmas")}

    @property
    def sizes(self) -> Sizes:
        """Which images the model can make."""
        return sizes_of(self.transformer, self.vae)

    @property
    def side(self) -> int:
        """Side of the images that the model makes if no size is configured, in pixels."""
        return self.transformer["sample_size"] * _scale(self.vae) if "sample_size" in self.transformer else SIDE

    @property
    def sign_of_distillation(self) -> str | None:
        """The evidence that the model was distilled to few steps; None if there is none.

        A name is weak evidence, but Z-Image-Turbo and SD3.5-Large-Turbo have nothing else.
        """
        if self.index.get("is_distilled"):
            return "its model_index.json says is_distilled"
        if self.family.name == "flux" and not self.transformer.get("guidance_embeds"):
            return "it is a FLUX.1 without embedded guidance, like schnell"
        words = re.split(r"[^a-z]+", self.model.path.rstrip("/").rsplit("/", 1)[-1].lower())
        named = next((word for word in DISTILLED_NAMES if word in words), None)
        return f"it is named {named}" if named else None

    def require_sizes(self, config: RunConfig) -> None:
        """Check that the model makes images of the sizes of training and evaluation, and takes the longest prompt."""
        _require_length(self.model, self.transformer)
        if self.model.height and self.model.width:
            self.sizes.require(self.model.height, self.model.width)
        if config.evaluation.size:
            self.sizes.require(*config.evaluation.size, names=("evaluation.height", "evaluation.width"))

    def require_conditions(self, prompts: Iterable[Prompt]) -> None:
        """Check that each prompt has as many condition images as the model takes.

        Raises:
            PromptError: one has more or fewer; the message names its line.
        """
        least, most = self.family.least_conditions, self.family.most_conditions
        what = f"{self.model.path}, a {self.family.pipeline},"

        def check(prompt: Prompt) -> None:
            got = len(prompt.conditions)
            if got and not most:
                raise PromptError(
                    f"{what} makes images of text alone, got {got} condition images: take an editing model"
                    " (docs/editing.md), or leave them out"
                )
            if not least <= got <= most:
                wanted = f"{least}" if least == most else f"{least} to {most}"
                raise PromptError(
                    f"{what} takes {wanted} condition images a prompt, got {got}: name them in the prompt file as"
                    " `image` or `images`"
                )

        check_each(prompts, check)

    def tiny_decoder(self, *, is_whole: bool = True) -> Path | None:
        """Return the folder of `model.tiny_decoder`; None without one. With `is_whole` its weights are downloaded too.

        Raises:
            ModelError: it is missing, it is no `AutoencoderTiny`, or it decodes other latents than the model's VAE.
        """
        path = self.model.tiny_decoder
        if path is None:
            return None
        is_remote, revision = is_on_hub(path), self.model.tiny_decoder_revision
        folder = tiny_decoder_folder(path, revision, is_whole=is_whole) if is_remote else resolve(path)
        tiny, vae = (_decoder_facts(file) for file in (folder / "config.json", self.folder / "vae" / "config.json"))
        if tiny is None or tiny.kind != "AutoencoderTiny":
            raise ModelError(
                f"model.tiny_decoder must be an AutoencoderTiny in diffusers' format, got {path}: take"
                " madebyollin/taesd3 for SD3 and SD3.5, madebyollin/taef1 for FLUX.1, or a folder"
            )
        if vae is None or vae.kind not in IMAGE_VAES:
            raise ModelError(
                f"model.tiny_decoder needs a model whose VAE is one of {list(IMAGE_VAES)}, which decode latents as they"
                f" are, got {path} for {self.model.path}, whose VAE is another or is not named: leave it out"
            )
        if (tiny.channels, tiny.scale) != (vae.channels, vae.scale):
            raise ModelError(
                f"model.tiny_decoder must decode the model's latents, of {vae.channels} channels to {vae.scale} times"
                f" their size, got {path} for {tiny.channels} channels and {tiny.scale} times: take this model's"
            )
        return folder


def locate(model: ModelConfig, *, is_whole: bool = False, has_encoders: bool = True) -> Located:
    """Find a model. Of a hub id, config files and tokenizers are downloaded, and with `is_whole` all its parts.

    Args:
        has_encoders: whether its text encoders are among these parts.

    Raises:
        ModelError: the model does not exist, its `model_index.json` is not readable, its family is not supported, or
            the folder lacks a part that the index names.
    """
    is_remote = is_on_hub(model.path)
    folder = index_folder(model.path, model.revision) if is_remote else _folder(model.path)
    index, family = _index(model.path, folder)
    located = Located(model, family, index, folder)
    lacking = [part for part in CORE_PARTS if part not in located.parts]
    if lacking:
        raise ModelError(f"model folder {model.path} must name {', '.join(CORE_PARTS)} in {INDEX}, got no {lacking[0]}")
    _require_schedule_class(index["scheduler"][-1], model.path)
    if is_remote and not is_whole:
        return Located(model, family, index, config_folder(model.path, model.revision))
    wanted = [part for part in located.parts if has_encoders or part not in family.text_parts]
    if is_remote:
        located = Located(model, family, index, model_folder(model.path, model.revision, wanted))
    absent = [name for name in wanted if not (located.folder / name).is_dir()]
    if absent:
        raise ModelError(
            f"model folder {model.path} must hold the parts that its model_index.json names, got none for {absent}"
        )
    return located


def adapter_config(model: ModelConfig) -> LoraConfig:
    """Return `model.lora` with the family's defaults filled in."""
    return locate(model).lora


def read_settings(file: Path) -> dict[str, Any]:
    """Read one of the JSON files of a model's folder.

    Raises:
        ModelError: it cannot be read, or is no mapping.
    """
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"model file {file} cannot be read: {one_line(error)}") from None
    if not isinstance(settings, dict):
        raise ModelError(f"model file {file} must hold a mapping, got {type(settings).__name__}")
    return settings


def sizes_of(transformer: Mapping[str, Any], vae: Mapping[str, Any]) -> Sizes:
    """Return which images a model can make, by the config of its transformer and of its VAE.

    Raises:
        ModelError: the VAE's config does not say how small its latents are.
    """
    positions = transformer.get("pos_embed_max_size")
    scale = _scale(vae)
    token = scale * (transformer.get("patch_size", PACK) if positions else PACK)
    return Sizes(scale=scale, token=token, most=positions and positions * token)


def commit_of(folder: Path, revision: str | None) -> str | None:
    """Return the commit after which a folder of the hub's cache is named; the revision if it has another name."""
    return folder.name if COMMIT.fullmatch(folder.name) else revision


def _folder(path: str) -> Path:
    folder = resolve(path)
    if folder.is_file():
        raise ModelError(
            f"model.path {path} is one file, not a folder in diffusers' format: load it with diffusers'"
            " from_single_file and save_pretrained a folder, or name a hub id"
        )
    if not folder.is_dir():
        raise ModelError(
            f"model folder {path} does not exist: set model.path to a folder in diffusers' format or to a hub id"
        )
    return folder


def _index(path: str, folder: Path) -> tuple[dict[str, Any], Family]:
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        pipeline = str(index["_class_name"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ModelError(
            f"model folder {path} must hold a readable model_index.json with a _class_name: is it in diffusers' format?"
        ) from None
    if pipeline not in FAMILIES:
        raise ModelError(f"model folder {path} must hold one of {sorted(FAMILIES)}, got {pipeline}")
    return index, FAMILIES[pipeline]


def _require_schedule_class(name: Any, path: str) -> None:
    if name != SCHEDULER:
        raise ModelError(
            f"the scheduler of model folder {path} must be a {SCHEDULER}, got {name}: our schedule would differ from"
            " its sigmas"
        )


def _require_length(model: ModelConfig, transformer: Mapping[str, Any]) -> None:
    """Check that the longest prompt fits a transformer that numbers prompt and image on one axis, as Z-Image's does.

    It fills the prompt to a multiple of `FILLED` tokens, numbers them from 1, and gives the image the next number.
    """
    if not (lengths := transformer.get("axes_lens")):
        return
    most = (lengths[0] - 2) // FILLED * FILLED
    if model.max_sequence_length > most:
        raise ModelError(
            f"model.max_sequence_length must be at most {most} for this model's {lengths[0]} positions, got"
            f" {model.max_sequence_length}: lower it"
        )


def _scale(vae: Mapping[str, Any]) -> int:
    """Return the pixels of a latent's side: each level halves the image. A video VAE lists its levels elsewhere."""
    if vae.get("temperal_downsample"):
        return 2 ** len(vae["temperal_downsample"])
    levels = vae.get("decoder_block_out_channels") or vae.get("block_out_channels")  # the first key is a tiny VAE's
    if not levels:
        raise ModelError(
            "the config of a model's VAE must name block_out_channels, got none: is it in diffusers' format?"
        )
    return 2 ** (len(levels) - 1)


@dataclass(frozen=True)
class _Decoder:
    kind: str
    channels: int
    scale: int


def _decoder_facts(file: Path) -> _Decoder | None:
    """Read which latents a VAE decodes, from its config file; None if it cannot be read."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        levels = settings.get("decoder_block_out_channels") or settings["block_out_channels"]
        factor = settings.get("upsampling_scaling_factor", 2)
        return _Decoder(str(settings["_class_name"]), int(settings["latent_channels"]), factor ** (len(levels) - 1))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
