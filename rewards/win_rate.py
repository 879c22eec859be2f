"""Win rates in a group: every image is compared with every other one of its prompt (Pref-GRPO, arXiv 2508.20751).

    rewards: {wins: {scorer: win_rate, sees: group, args: {compare: "my_package.mine:Brighter"}}}

The judge is a class with a method `compare(first, second, prompt, metadata)`. It returns the first image's share of the
win (1, 0, ½ for a tie, or a number between) and a reason, which is empty if there is an answer; with a reason the share
does not matter.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from typing import Any

import numpy as np

from protocol.errors import ContractError, ScorerError, named_line
from protocol.messages import Metadata, Prompt, Scores
from rewards.loading import build_from_path, require_class_ready
from rewards.scores import partly


class WinRate:
    """The mean share of an image in its comparisons with the others of its group; in [0, 1], with mean ½.

    A comparison without an answer counts for neither image. An image has no score if none of its comparisons has an
    answer.

    Worked number: of four images 30 beats all, 10 loses to all, and the two others tie: 1, 0, ½, ½. If all comparisons
    with 10 fail, it has no score, and the others have 1, ¼, ¼.
    """

    name = "win_rate"
    low = 0.0
    high = 1.0
    sees = "group"

    def __init__(
        self, *, compare: str, settings: Mapping[str, Any] | None = None, both_orders: bool = True, parallel: int = 8
    ) -> None:
        """Make the judge.

        Args:
            compare: its class, `package.module:Class`.
            both_orders: compare each pair in both orders, N (N - 1) comparisons of N images, and take the mean share; a
                judge that always prefers the first image then gives a tie. If one order has no answer, the pair has
                none.
            parallel: comparisons in progress at one time; above 1 the class must allow calls from several threads.
        """
        self._judge = build_from_path(compare, args=settings or {})
        if not callable(getattr(self._judge, "compare", None)):
            raise ScorerError(f"compare of win_rate must name a class with a method `compare`, got {compare}")
        if parallel < 1:
            raise ScorerError(f"parallel of win_rate must be at least 1, got {parallel}")
        self._both_orders = both_orders
        self._threads = ThreadPoolExecutor(max_workers=parallel, thread_name_prefix="win-rate")

    @staticmethod
    def ready(*, compare: str, settings: Mapping[str, Any] | None = None, **_: Any) -> None:
        require_class_ready(compare, settings or {})

    @staticmethod
    def check(prompts: Sequence[Prompt]) -> None: ...

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        """Compare all pairs of one group's images uint8 [N, H, W, 3].

        Raises:
            ContractError: the images do not belong to one group, or a share lies outside [0, 1].
        """
        if len(set(prompts)) > 1:
            raise ContractError(f"the images must belong to one group, got {len(set(prompts))} prompts in one call")
        pairs = list(combinations(range(len(images)), 2))
        asked = [(one, other) for pair in pairs for one, other in (pair, pair[::-1])[: 1 + self._both_orders]]
        answers = list(
            self._threads.map(lambda way: self._share(images[way[0]], images[way[1]], prompts[0], metadata[0]), asked)
        )
        shares = dict(zip(asked, answers, strict=True))
        won: list[list[float]] = [[] for _ in images]
        reasons = [""] * len(images)
        for one, other in pairs:
            held = [shares[one, other]]
            if self._both_orders:
                share, reason = shares[other, one]
                held.append((1 - share, reason))
            reason = next((reason for _, reason in held if reason), "")
            for image in (one, other):
                reasons[image] = reasons[image] or reason
            if not reason:
                share = sum(share for share, _ in held) / len(held)
                won[one].append(share)
                won[other].append(1 - share)
        return partly(
            [sum(each) / len(each) if each else math.nan for each in won],
            [
                "" if each else reason or "it has no other image in its group"
                for each, reason in zip(won, reasons, strict=True)
            ],
            {"comparisons": [float(len(each)) for each in won]},
        )

    def _share(self, first: np.ndarray, second: np.ndarray, prompt: str, metadata: Metadata) -> tuple[float, str]:
        try:
            share, reason = self._judge.compare(first, second, prompt, metadata)
        except ContractError:
            raise
        except Exception as error:  # noqa: BLE001  any failure means the same: no answer
            return math.nan, named_line(error)
        if reason:
            return math.nan, reason
        if not 0 <= share <= 1:
            raise ContractError(f"a share must lie in [0, 1], got {share}")
        return share, ""
