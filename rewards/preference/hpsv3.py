"""HPSv3: how much would people like this image for this prompt? (Ma et al. 2025, arXiv 2508.03789)

scorer = build_scorer("hpsv3", template="data_collator_qwen.py")

A Qwen2-VL reads the image, the authors' instruction with the prompt in it, and the token <|Reward|>. A head of linear
layers with ReLUs turns the state h of that token into mean and spread; the score is the mean: score = head(h)[0].

The instruction is the authors' text and not part of this package: `template` names their file that holds it.
"""

import ast
from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.errors import PromptError, ScorerError, one_line
from protocol.ground.resources import resolve
from protocol.messages import Metadata, Prompt, Scores
from protocol.prompts import check_each
from rewards.checkpoint import checkpoint_outline, holds_tensors, linear_head, read_tensors, require_checkpoint
from rewards.pretrained import load_pretrained, require_pretrained
from rewards.scores import scored

MODEL = "MizzenAI/HPSv3"
FILE = "HPSv3.safetensors"
BASE = "Qwen/Qwen2-VL-7B-Instruct"
REWARD, IMAGE = "<|Reward|>", "<|image_pad|>"
PIXELS = 256 * 28 * 28
"""Approximate number of pixels to which every image is resized; its aspect ratio stays."""
TEXTS = ("INSTRUCTION", "prompt_with_special_token")
"""Names of the two texts in the template's file."""


class HPSv3:
    """HPSv3: a mean without bounds, about -2 to 12 for the authors' comparison of models.

    It sees the whole image, at about 256 x 28 x 28 pixels. Positions count tokens, also those of the image, as in the
    authors' code; two dimensions give other scores.

    Weights: `HPSv3.safetensors` of `MizzenAI/HPSv3` (17 GB), in the layout of the authors' package, and the config and
    tokenizer of `Qwen/Qwen2-VL-7B-Instruct`. Each image has its own forward, so other images cannot change its score.
    """

    name = "hpsv3"
    low = float("-inf")
    high = float("inf")

    def __init__(
        self,
        *,
        template: str,
        model: str = MODEL,
        base: str = BASE,
        device: str | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        """Load the weights.

        Args:
            template: the authors' file `hpsv3/dataset/data_collator_qwen.py`, or any Python file that assigns strings
                to `INSTRUCTION`, with `{text_prompt}` in it, and to `prompt_with_special_token`, with `<|Reward|>` in
                it. It is read and never run.
            model: a file `*.safetensors`, a folder that holds `HPSv3.safetensors`, or a hub id.
            base: folder, `pkg://` path or hub id of the Qwen2-VL whose config and tokenizer the weights need.
            dtype: `bfloat16`, as the authors run it, or `float32`, which by the weights' size takes twice the 17 GB of
                a GPU. The head always computes in float32.

        Raises:
            ScorerError: weights, tokenizer or template cannot be loaded, or do not fit each other.
        """
        import torch
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        from flow.device import best_device

        if dtype not in ("bfloat16", "float32"):
            raise ScorerError(f"dtype must be bfloat16 or float32, got {dtype!r}")
        self._torch = torch
        self._device = device or best_device()
        self._template = _read_template(template)
        self._tokenizer, config = _base_of(base)
        self._reward, self._image = map(self._tokenizer.convert_tokens_to_ids, (REWARD, IMAGE))
        vision = config.vision_config
        self._cells = vision.spatial_merge_size**2
        self._images: Any = Qwen2VLImageProcessorPil(
            size={"shortest_edge": PIXELS, "longest_edge": PIXELS},
            patch_size=vision.patch_size,
            temporal_patch_size=vision.temporal_patch_size,
            merge_size=vision.spatial_merge_size,
        )
        backbone, head = _network_of(load_pretrained(read_tensors, model, file=FILE), config, model, dtype)
        self._backbone = backbone.to(self._device).eval().requires_grad_(requires_grad=False)
        self._head = head.to(self._device).eval().requires_grad_(requires_grad=False)

    @staticmethod
    def ready(*, template: str, model: str = MODEL, base: str = BASE, **_: Any) -> None:
        """Check that weights, tokenizer and template exist, and by the headers that they fit each other.

        Args:
            template: the file with the authors' texts; it is read.

        Raises:
            ScorerError: one is missing.
        """
        _read_template(template)
        require_checkpoint(model, file=FILE)
        require_pretrained(base, "config.json")
        require_pretrained(base, "tokenizer.json", "vocab.json")
        saved = checkpoint_outline(model, file=FILE)
        if saved and resolve(base).is_dir():
            _network_of(saved, _base_of(base)[1], model, "bfloat16")

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Check that no prompt holds a token that marks the image or the score.

        Raises:
            PromptError: a prompt does; the error names the first such line.
        """
        check_each(prompts, lambda prompt: _require_plain(prompt.text))

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        return scored([self._rated(image, prompt) for image, prompt in zip(images, prompts, strict=True)])

    def _rated(self, image: np.ndarray, prompt: str) -> float:
        _require_plain(prompt)
        seen = self._images(images=[image], return_tensors="pt").to(self._device)
        text = self._template.replace(MARK, prompt)
        content = [{"type": "image"}, {"type": "text", "text": text}]
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        patches = int(seen.image_grid_thw.prod()) // self._cells
        ids = self._tokenizer(chat.replace(IMAGE, IMAGE * patches), return_tensors="pt").input_ids.to(self._device)
        with self._torch.inference_mode():
            features = self._backbone.get_image_features(seen.pixel_values, seen.image_grid_thw).pooler_output[0]
            states = self._backbone.get_input_embeddings()(ids)
            states[0, ids[0] == self._image] = features.to(states.dtype)
            # Without `input_ids` the positions count tokens, image or not, as they did in the authors' training.
            states = self._backbone.model.language_model(inputs_embeds=states, use_cache=False).last_hidden_state
            return float(self._head(states[0, ids[0] == self._reward].float())[0, 0])


MARK = "{text_prompt}"


def _read_template(path: str) -> str:
    """Return instruction and question with `{text_prompt}` where the prompt goes.

    Raises:
        ScorerError: the file cannot be read or lacks a text.
    """
    try:
        body = ast.parse(resolve(path).read_text(encoding="utf-8")).body
    except (OSError, ValueError, SyntaxError) as error:
        raise ScorerError(
            f"template {path!r} cannot be read: {one_line(error)}; give the authors' file"
            " hpsv3/dataset/data_collator_qwen.py of https://github.com/MizzenAI/HPSv3"
        ) from None
    values = {
        target.id: node.value.value
        for node in body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    text = "".join(str(values.get(name, "")) for name in TEXTS)
    if text.count(MARK) != 1 or text.count(REWARD) != 1 or IMAGE in text:
        raise ScorerError(
            f"template {path!r} must assign texts to {' and '.join(TEXTS)} that hold {MARK} and {REWARD} once each, got"
            f" {text.count(MARK)} and {text.count(REWARD)}: give the authors' data_collator_qwen.py"
        )
    return text


def _require_plain(prompt: str) -> None:
    for token in (REWARD, IMAGE):
        if token in prompt:
            raise PromptError(f"a prompt for hpsv3 must not hold {token}: remove it")


def _base_of(base: str) -> tuple[Any, Any]:
    """Load the tokenizer, with the token of the score, and the config of a Qwen2-VL with as many tokens."""
    from transformers import Qwen2Tokenizer, Qwen2VLConfig

    tokenizer: Any = load_pretrained(Qwen2Tokenizer.from_pretrained, base)
    if tokenizer.chat_template is None:
        raise ScorerError(f"the tokenizer of {base!r} must have a chat template: give a Qwen2-VL-Instruct")
    tokenizer.add_tokens([REWARD], special_tokens=True)
    config: Any = load_pretrained(Qwen2VLConfig.from_pretrained, base)
    config.text_config.vocab_size = len(tokenizer)
    return tokenizer, config


def _network_of(tensors: dict[str, Any], config: Any, source: str, dtype: str) -> tuple[Any, Any]:
    """Make transformers' Qwen2-VL and the head from the authors' tensors.

    Args:
        tensors: tensors by the authors' names: as in Qwen2-VL's published checkpoints, and `rm_head.N`.
        dtype: dtype of the Qwen2-VL; the head stays float32.

    Returns:
        The Qwen2-VL; the head.

    Raises:
        ScorerError: a tensor is missing, is of another shape, or has a name that HPSv3 does not have.
    """
    import torch
    from torch import nn
    from transformers import Qwen2VLForConditionalGeneration

    where = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))  # `meta` for an outline
    ours = {name: tensor for name, tensor in tensors.items() if name.startswith("rm_head.")}
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    rest = {name: tensor for name, tensor in tensors.items() if name not in ours}
    with holds_tensors(source, "HPSv3", f"give {FILE} of {MODEL} and the Qwen2-VL of its size") as require_names:
        with where:
            head = linear_head(shapes, "rm_head", inputs=config.text_config.hidden_size, outputs=2, activation=nn.ReLU)
        head.load_state_dict({name.removeprefix("rm_head."): tensor.float() for name, tensor in ours.items()})
        options = {"config": config, "state_dict": rest, "dtype": getattr(torch, dtype), "output_loading_info": True}
        options |= {"ignore_mismatched_sizes": True}  # names them in `loading_info`, where it would raise a table
        options |= {"device_map": "meta"} if where.type == "meta" else {}
        load: Any = Qwen2VLForConditionalGeneration.from_pretrained
        backbone, loading_info = load_pretrained(lambda _: load(None, **options), source)
        require_names(loading_info["missing_keys"], loading_info["unexpected_keys"])
        for name, got, wanted in loading_info["mismatched_keys"]:
            raise RuntimeError(f"{list(got)} of {name}, which must be {list(wanted)}")
    return backbone, head
