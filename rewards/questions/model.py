"""A Qwen3-VL that answers a question about an image with one token.

model = QuestionModel("Qwen/Qwen3-VL-8B-Instruct")
(yes,) = model.probabilities(image, "Is the cat red? Answer in one word.", ["Yes", "yes"])
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from protocol.errors import ScorerError
from rewards.pretrained import WEIGHTS, load_pretrained, require_pretrained, require_whole

MODEL = "Qwen/Qwen3-VL-8B-Instruct"
IMAGE = "<|image_pad|>"
MARK = "{question}"


class QuestionModel:
    """Each question has a forward of its own, so no other question or image changes an answer."""

    def __init__(self, model: str, *, device: str | None, dtype: str) -> None:
        """Load the weights.

        Args:
            model: folder, `pkg://` path or hub id of a Qwen3-VL.
            device: torch device; by default the GPU if there is one.
            dtype: `bfloat16` or `float32`.

        Raises:
            ScorerError: weights, tokenizer or image processor cannot be loaded.
        """
        import torch
        from transformers import Qwen2Tokenizer, Qwen3VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        from flow.device import best_device

        if dtype not in ("bfloat16", "float32"):
            raise ScorerError(f"dtype must be bfloat16 or float32, got {dtype!r}")
        self._torch, self._device = torch, device or best_device()
        self._tokenizer: Any = load_pretrained(Qwen2Tokenizer.from_pretrained, model)
        if self._tokenizer.chat_template is None:
            raise ScorerError(f"the tokenizer of {model!r} must have a chat template: give a Qwen3-VL-Instruct")
        self._images: Any = load_pretrained(Qwen2VLImageProcessorPil.from_pretrained, model)
        loaded: Any = load_pretrained(
            Qwen3VLForConditionalGeneration.from_pretrained, model, dtype=getattr(torch, dtype)
        )
        self._model: Any = loaded.to(self._device).eval().requires_grad_(requires_grad=False)

    @staticmethod
    def ready(model: str) -> None:
        """Check that tokenizer, image processor and weights exist, and the weights' headers (ScorerError)."""
        from transformers import Qwen3VLForConditionalGeneration

        for patterns in (("config.json",), ("preprocessor_config.json",), ("tokenizer.json", "vocab.json"), WEIGHTS):
            require_pretrained(model, *patterns)
        require_whole(Qwen3VLForConditionalGeneration.from_pretrained, model)

    def probabilities(self, image: np.ndarray, words: str, *lists: Sequence[str]) -> list[float]:
        """Return, for each list of answers, the probability that the reply to `words` begins with one of them.

        As in GenEval 2's release, the probabilities of the answers' first tokens are added, also of two answers that
        begin with the same token.

        Args:
            image: uint8 [H, W, 3].
        """
        torch = self._torch
        seen = self._images(images=[image], return_tensors="pt").to(self._device)
        content = [{"type": "image"}, {"type": "text", "text": words}]
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        patches = int(seen.image_grid_thw.prod()) // self._images.merge_size**2
        ids = self._tokenizer(chat.replace(IMAGE, IMAGE * patches, 1), return_tensors="pt").input_ids.to(self._device)
        kinds = (ids == self._model.config.image_token_id).int()  # 1 marks the tokens of an image
        with torch.inference_mode():
            logits = self._model(
                input_ids=ids,
                mm_token_type_ids=kinds,
                pixel_values=seen.pixel_values,
                image_grid_thw=seen.image_grid_thw,
                logits_to_keep=1,
            ).logits[0, -1]
            chances = logits.float().softmax(-1)
        firsts = ([self._tokenizer.encode(answer)[0] for answer in answers] for answers in lists)
        return [float(sum(chances[first] for first in tokens)) for tokens in firsts]


def require_instruction(instruction: str, *, of: str) -> None:
    """Check that an instruction holds `{question}` once and no image (ScorerError)."""
    if instruction.count(MARK) != 1 or IMAGE in instruction:
        raise ScorerError(f"instruction of {of} must hold {MARK} once and no {IMAGE}, got {instruction!r}")
