"""A vision-language model compares two images of one prompt, for the scorer `win_rate` (Pref-GRPO, arXiv 2508.20751).

rewards: {wins: {scorer: win_rate, sees: group, args: {compare: "rewards.http.vlm_pairs:VlmPairs",
                 settings: {url: "http://127.0.0.1:8000/v1", model: "UnifiedReward-Think-7b"}}}}
"""

import numpy as np

from protocol.messages import Metadata
from rewards.http.caller import HttpCaller, require_server
from rewards.http.chat import ChatModel, checked_pattern

PATTERN = r"(?m)^\s*Better Image:\s*(1|2|tie)\s*$"
INSTRUCTION = (
    "You see two images, image 1 and image 2, that were generated from this description:\n\n{prompt}\n\n"
    "Which one shows better what the description says: every object, its number, colours, positions and texts, without"
    " errors in the image? Write one short sentence of reasons, and end with a line of exactly this form, where X is 1,"
    " 2 or tie:\n"
    "Better Image: X"
)
SHARES = {"1": 1.0, "2": 0.0, "tie": 0.5}


class VlmPairs:
    """Asks at temperature 0 which of two images is better; an answer needs one line `Better Image: 1`, `2` or `tie`."""

    ready = staticmethod(require_server)

    def __init__(
        self,
        *,
        url: str,
        model: str,
        instruction: str = INSTRUCTION,
        pattern: str = PATTERN,
        max_tokens: int = 512,
        timeout_s: float = 120.0,
        tries: int = 3,
        deadline_s: float = 300.0,
        token_env: str | None = None,
    ) -> None:
        """Check the settings; no request is sent.

        Args:
            url: address of the endpoint, up to and including `/v1`.
            instruction: the question; `{prompt}` is filled in.
            pattern: regular expression with one group, `1`, `2` or `tie`; it must match exactly once.

        Raises:
            ScorerError: a setting is out of range or cannot be parsed.
        """
        self._pattern = checked_pattern(pattern, instruction, of="VlmPairs")
        caller = HttpCaller(url, timeout_s=timeout_s, tries=tries, deadline_s=deadline_s, token_env=token_env)
        self._chat, self._instruction = ChatModel(caller, model=model, max_tokens=max_tokens), instruction

    def compare(self, first: np.ndarray, second: np.ndarray, prompt: str, metadata: Metadata) -> tuple[float, str]:
        """Return 1 if the first image is better, 0 if the second is, ½ if neither is, or NaN and a reason.

        Args:
            first: uint8 [H, W, 3].
            second: as `first`.

        Returns:
            The share of the first image, and a reason, which is empty if there is an answer.
        """
        del metadata
        text, reason = self._chat.ask([first, second], self._instruction.format(prompt=prompt))
        if reason:
            return float("nan"), reason
        found = self._pattern.findall(text) if isinstance(text, str) else []
        if len(found) != 1 or found[0] not in SHARES:
            return float("nan"), f"the answer must say once 1, 2 or tie, got {found}: {str(text)[-120:]!r}"
        return SHARES[found[0]], ""
