"""A vision-language model as judge, through any OpenAI-compatible endpoint (vLLM, SGLang, a hosted one).

    scorer = build_scorer("vlm_judge", url="http://127.0.0.1:8000/v1", model="UnifiedReward-7b-v1.5")

The answer is parsed strictly: exactly one line must match the pattern, with a number in range. Any other answer is a
missing score, never 0.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from protocol.errors import ScorerError
from protocol.messages import Metadata, Prompt, Scores
from rewards.http.caller import HttpCaller, require_server
from rewards.http.chat import ChatModel, checked_pattern
from rewards.scores import partly

PATTERN = r"(?m)^\s*Final Score:\s*(-?\d+(?:\.\d+)?)\s*$"
INSTRUCTION = (
    "You see an image that was generated from this description:\n\n{prompt}\n\n"
    "Judge how well the image shows what the description says: every object, its number, colours, positions and texts,"
    " and whether the image is free of errors. Give a score from {low} (shows nothing of it) to {high} (shows all of"
    " it without fault). Write one short sentence of reasons, and end with a line of exactly this form:\n"
    "Final Score: <number>"
)


class VlmJudge:
    """Asks for one judgement per image at temperature 0; value = number / high, in [low / high, 1].

    UnifiedReward (arXiv 2503.05236) was trained with its own instruction: give that as `instruction`.
    """

    name = "vlm_judge"
    ready = staticmethod(require_server)

    def __init__(
        self,
        *,
        url: str,
        model: str,
        instruction: str = INSTRUCTION,
        pattern: str = PATTERN,
        low: float = 1.0,
        high: float = 5.0,
        max_tokens: int = 512,
        parallel: int = 8,
        timeout_s: float = 120.0,
        tries: int = 3,
        deadline_s: float = 300.0,
        token_env: str | None = None,
    ) -> None:
        """Check the settings; no request is sent.

        Args:
            url: address of the endpoint, up to and including `/v1`.
            instruction: the question; `{prompt}`, `{low}` and `{high}` are filled in.
            pattern: regular expression with one group, the number; it must match exactly once.
            low: least valid number.
            high: largest valid number, by which the number is divided; above 0.

        Raises:
            ScorerError: a setting is out of range or cannot be parsed.
        """
        self._pattern = checked_pattern(pattern, instruction, of="vlm_judge", low="", high="")
        if not low < high or high <= 0:
            raise ScorerError(f"low must be less than high and high above 0, got {low} and {high}")
        caller = HttpCaller(url, timeout_s=timeout_s, tries=tries, deadline_s=deadline_s, token_env=token_env)
        self._chat = ChatModel(caller, model=model, max_tokens=max_tokens)
        self._threads = ThreadPoolExecutor(max_workers=parallel, thread_name_prefix="vlm-judge")
        self._instruction, self._low, self._high = instruction, low, high
        self.low, self.high = low / high, 1.0

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None: ...

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:  # noqa: ARG002
        """Send one request for each image."""
        answers = list(self._threads.map(self._judge, images, prompts))
        return partly([value for value, _ in answers], [reason for _, reason in answers])

    def _judge(self, image: np.ndarray, prompt: str) -> tuple[float, str]:
        words = self._instruction.format(prompt=prompt, low=f"{self._low:g}", high=f"{self._high:g}")
        text, reason = self._chat.ask([image], words)
        return (float("nan"), reason) if reason else self._parse(text)

    def _parse(self, text: object) -> tuple[float, str]:
        found = self._pattern.findall(text) if isinstance(text, str) else []
        if len(found) != 1:
            return float("nan"), f"the answer must hold one score, got {len(found)}: {str(text)[-120:]!r}"
        try:
            number = float(found[0])
        except ValueError:
            return float("nan"), f"the answer's score must be a number, got {found[0]!r}"
        if not self._low <= number <= self._high:
            return float("nan"), f"the answer's score must lie in [{self._low:g}, {self._high:g}], got {number:g}"
        return number / self._high, ""
