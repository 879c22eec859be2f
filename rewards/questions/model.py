"""A Qwen3-VL that answers a question about images, with one token or in words.

model = QuestionModel("Qwen/Qwen3-VL-8B-Instruct")
(yes,) = model.probabilities(image, "Is the cat red? Answer in one word.", ["Yes", "yes"])
text, reason = model.ask([before, after], "What has changed?")
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
    """Each question has a forward of its own, so no other question or image changes an answer.

    In words it answers with the likeliest ones.
    """

    parallel = 1
    """Questions that it answers at one time."""

    def __init__(
        self, model: str = MODEL, *, device: str | None = None, dtype: str = "bfloat16", max_tokens: int = 512
    ) -> None:
        """Load the weights.

        Args:
            model: folder, `pkg://` path or hub id of a Qwen3-VL.
            dtype: `bfloat16` or `float32`.
            max_tokens: of an answer in words.

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
        self._max_tokens = max_tokens

    @staticmethod
    def ready(model: str = MODEL, **_: object) -> None:
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
        with self._torch.inference_mode():
            logits = self._model(**self._asked([image], words, words_first=False), logits_to_keep=1).logits[0, -1]
            chances = logits.float().softmax(-1)
        firsts = ([self._tokenizer.encode(answer)[0] for answer in answers] for answers in lists)
        return [float(sum(chances[first] for first in tokens)) for tokens in firsts]

    def ask(self, images: Sequence[np.ndarray], words: str, *, words_first: bool = False) -> tuple[object, str]:
        """Answer in words, always with the likeliest token, as `rewards.http.chat.ChatModel.ask` does.

        Args:
            images: each uint8 [H, W, 3].

        Returns:
            The answer and an empty reason, or None and the reason.
        """
        if IMAGE in words:
            return None, f"a question must not hold {IMAGE}"
        greedy = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
        with self._torch.inference_mode():
            asked = self._asked(images, words, words_first=words_first)
            found = self._model.generate(
                **asked, **greedy, max_new_tokens=self._max_tokens, pad_token_id=self._tokenizer.pad_token_id
            )
        answer = found[0, asked["input_ids"].shape[1] :]
        return self._tokenizer.decode(answer, skip_special_tokens=True), ""

    def _asked(self, images: Sequence[np.ndarray], words: str, *, words_first: bool) -> dict[str, Any]:
        """Return the model's inputs; `words` hold no `IMAGE`."""
        seen = self._images(images=list(images), return_tensors="pt").to(self._device)
        shown, question = [{"type": "image"} for _ in images], [{"type": "text", "text": words}]
        content = [*question, *shown] if words_first else [*shown, *question]
        chat = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        patches = (seen.image_grid_thw.prod(-1) // self._images.merge_size**2).tolist()
        text = "".join(part + IMAGE * count for part, count in zip(chat.split(IMAGE), [*patches, 0], strict=True))
        ids = self._tokenizer(text, return_tensors="pt").input_ids.to(self._device)
        return {
            "input_ids": ids,
            "mm_token_type_ids": (ids == self._model.config.image_token_id).int(),  # 1 marks the tokens of an image
            "pixel_values": seen.pixel_values,
            "image_grid_thw": seen.image_grid_thw,
        }


def require_instruction(instruction: str, *, of: str) -> None:
    """Check that an instruction holds `{question}` once and no image (ScorerError)."""
    if instruction.count(MARK) != 1 or IMAGE in instruction:
        raise ScorerError(f"instruction of {of} must hold {MARK} once and no {IMAGE}, got {instruction!r}")
