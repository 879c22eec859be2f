"""The text reward: does the image show the words that its prompt puts in double quotes?

scorer = build_scorer("ocr")                         # RapidOCR, whose models are part of the package
scorer = build_scorer("ocr", engine="paddleocr")
"""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args

import numpy as np

from protocol.errors import PromptError, ScorerError, named_line, suggest
from protocol.messages import Metadata, Prompt, Scores
from protocol.prompts import check_each
from rewards.loading import build_from_path, require_class_ready, require_library
from rewards.scores import partly

ENGINES = {"rapidocr": "rewards.ocr.engines:RapidOcr", "paddleocr": "rewards.ocr.engines:PaddleOcr"}
"""Engines by short name; any other engine is named by its import path `package.module:Class`."""
EXTRAS = {"rapidocr": "ocr", "paddleocr": "paddleocr"}
"""Optional dependency groups of these engines."""
Form = Literal["folded", "flow_grpo"]
"""The values of the argument `text`."""


class TextReader(Protocol):
    """An OCR engine. The scorer constructs it with the argument `threads`."""

    def read(self, image: np.ndarray) -> list[str]:
        """Return the lines of one image uint8 [H, W, 3] from top to bottom; an empty list if there are none."""
        ...


class Ocr:
    """The text reward of Flow-GRPO (arXiv 2505.05470), in [0, 1]:

        r = 1 - min(d, |target|) / |target|,   d = 0 if the read text contains target, else Levenshtein's distance

    `target` is the text between the prompt's first double quotes. Both texts are compared in the form `folded` (ours)
    or in the form of Flow-GRPO's released code, and |target| is the length of that form. An image without any text has
    the valid score 0, since the engine has examined it. An image on which the engine fails has no score.

    Weights: `rapidocr` downloads none; its detection and recognition models are part of the package.
    """

    name = "ocr"
    low = 0.0
    high = 1.0

    def __init__(
        self,
        *,
        engine: str = "rapidocr",
        text: Form = "folded",
        min_side: int = 192,
        threads: int = 1,
        engine_args: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Load the engine.

        Args:
            engine: `rapidocr`, `paddleocr` (`pip install -e '.[paddleocr]'`), or the import path of a `TextReader`.
            text: the form in which target and reading are compared: `folded` or `flow_grpo`. `folded` leaves out case,
                blanks, format characters and the printed forms of quotes, hyphens and dots (NFKC), `flow_grpo` case and
                U+0020; there `DON’T` is one letter of five away from `DON'T`.
            min_side: least length of an image's shorter side in pixels; smaller images are enlarged by a whole factor.
            threads: CPU threads of the engine; more reward actors use the CPU better than more threads.
            engine_args: further arguments of the engine, such as `{line_width: 96}`, which saves time if all words are
                short: RapidOCR pads lines to 320 pixels.

        Raises:
            ScorerError: the engine cannot be loaded, or an argument is out of range.
        """
        from rapidfuzz.distance import Levenshtein

        if min_side < 1 or threads < 1:
            raise ScorerError(f"min_side and threads of ocr must be at least 1, got {min_side} and {threads}")
        if "threads" in engine_args:
            raise ScorerError(
                "engine_args of ocr must not hold threads: set the scorer's own argument `threads` instead"
            )
        self._form = _form_of(text)
        self._distance = Levenshtein.distance
        self._engine: TextReader = build_from_path(
            ENGINES.get(engine, engine), args={"threads": threads, **engine_args}, extra=EXTRAS.get(engine)
        )
        self._min_side = min_side

    @staticmethod
    def ready(
        *,
        engine: str = "rapidocr",
        text: Form = "folded",
        threads: int = 1,
        engine_args: Mapping[str, Any] = MappingProxyType({}),
        **_: Any,
    ) -> None:
        """Check that the engine's library is installed.

        Raises:
            ScorerError: it is not.
        """
        _form_of(text)
        require_library("rapidfuzz")
        require_class_ready(ENGINES.get(engine, engine), {"threads": threads, **engine_args}, EXTRAS.get(engine))

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None:
        """Check that every prompt has a text in double quotes.

        Raises:
            PromptError: a prompt has none; the error names the first such line.
        """
        check_each(prompts, lambda prompt: quoted_text(prompt.text))

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        answers = [self._score_one(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
        values = np.array([value for value, _ in answers], np.float32)
        return partly(values, [reason for _, reason in answers], {"exact": values == 1.0})

    def _score_one(self, image: np.ndarray, prompt: str) -> tuple[float, str]:
        target = self._form(quoted_text(prompt))
        try:
            lines = self._engine.read(enlarged(image, self._min_side))
        except Exception as error:  # noqa: BLE001  any failure of an engine means that this image has no score
            return float("nan"), f"ocr: {named_line(error)}"
        read = self._form("".join(lines))
        distance = 0 if target in read else min(self._distance(read, target), len(target))
        return 1 - distance / len(target), ""


def _form_of(text: Form) -> Callable[[str], str]:
    if text not in FORMS:
        raise ScorerError(f"text of ocr must be one of {list(get_args(Form))}, got {text!r}: {suggest(text, FORMS)}")
    return FORMS[text]


def quoted_text(prompt: str) -> str:
    """Return the words that the image must show, between the first two `"` of a prompt.

    Raises:
        PromptError: a quote has no partner, or there are no visible words between the first two.
    """
    parts = prompt.split('"')
    if len(parts) < 3:
        raise PromptError('a prompt of the text task must hold its words in double quotes, such as a sign "OPEN"')
    if not len(parts) % 2:
        raise PromptError(
            f"a prompt of the text task must hold its double quotes in pairs, got {len(parts) - 1} of them: remove one,"
            " such as the sign for inches"
        )
    if not folded(parts[1]):
        raise PromptError(
            f"a prompt of the text task must hold words between its first double quotes, got {parts[1]!a}"
        )
    return parts[1]


def folded(text: str) -> str:
    """Return the text as the eye reads it, in lower case (ours).

    It is in the normal form NFKC, which joins accents and narrows full-width letters; straight quotes, hyphens and
    three dots stand for their printed forms; blanks and format characters, which nobody sees, are left out.
    """
    seen = "".join(letter for letter in text.translate(STRAIGHT) if unicodedata.category(letter) != "Cf")
    return "".join(unicodedata.normalize("NFKC", seen).lower().split())


def as_released(text: str) -> str:
    """Return the text without U+0020, in lower case, as in Flow-GRPO's released code."""
    return text.replace(" ", "").lower()


FORMS: Mapping[Form, Callable[[str], str]] = {"folded": folded, "flow_grpo": as_released}
"""The forms in which target and reading are compared, by the argument `text`."""
STRAIGHT = {
    ord(letter): plain
    for letters, plain in (("‘’‚‛′`´", "'"), ("“”„‟″«»", '"'), ("‐‑‒–—―−﹘﹣", "-"))
    for letter in letters
}
"""Maps printed quotes, primes and dashes to a keyboard's; NFKC turns an ellipsis into three dots."""


def enlarged(image: np.ndarray, min_side: int) -> np.ndarray:
    """Enlarge a small image bicubically by the least whole factor that brings its shorter side to `min_side` pixels."""
    height, width = image.shape[:2]
    factor = -(-min_side // min(height, width))
    if factor <= 1:
        return image
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize((factor * width, factor * height), Image.Resampling.BICUBIC))
