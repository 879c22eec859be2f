"""A scorer that another machine serves with `flowcredit serve-rewards`; images are sent as PNG.

Condition images are sent only if the served scorer looks at them, each once for a request.

scorer = build_scorer("remote", url="http://10.0.0.7:8100", scorer="ocr")
"""

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from protocol.errors import ContractError, PromptError, ScorerError, suggest
from protocol.messages import Metadata, Prompt, Scores
from rewards.http.caller import CallError, HttpCaller, Reply
from rewards.http.wire import (
    JSON,
    MOST_ITEMS,
    MSGPACK,
    REQUEST_PIXELS,
    CheckCall,
    CheckReply,
    Item,
    Message,
    PromptLine,
    Read,
    ScoreCall,
    ScoreReply,
    ScorerList,
    read_message,
    scores_of,
    write_message,
)
from rewards.images import encode_png
from rewards.scores import joined

KINDS = {"msgpack": MSGPACK, "json": JSON}


class RemoteScorer:
    """The client of one scorer of a reward service, with that scorer's name and range.

    If a request fails on its last try, only its own images have no score; the reason is the failure.
    """

    def __init__(
        self,
        *,
        url: str,
        scorer: str,
        timeout_s: float = 60.0,
        tries: int = 4,
        deadline_s: float = 180.0,
        batch: int = 16,
        parallel: int = 2,
        wire: str = "msgpack",
        token_env: str | None = None,
    ) -> None:
        """Ask the service for its scorers.

        Args:
            batch: images in one request, condition images included; a group is always one request.
            wire: `msgpack` or `json`.
            token_env: environment variable that holds the service's token.

        Raises:
            ScorerError: no service answers there, or it does not have that scorer.
        """
        if wire not in KINDS or batch < 1 or parallel < 1:
            raise ScorerError(
                f"wire must be msgpack or json, batch and parallel at least 1, got {wire!r}, {batch}, {parallel}"
            )
        self._kind, self.name = KINDS[wire], scorer
        self._caller = HttpCaller(url, timeout_s=timeout_s, tries=tries, deadline_s=deadline_s, token_env=token_env)
        self._threads = ThreadPoolExecutor(max_workers=parallel, thread_name_prefix="remote-scorer")
        try:
            served = self._read(ScorerList, self._caller.call("GET", "/v1/scorers"))
        except (CallError, ContractError) as error:
            raise ScorerError(f"no reward service answers: {error}; start one with flowcredit serve-rewards") from None
        facts = {item.name: item for item in served.scorers}
        if scorer not in facts:
            raise ScorerError(f"the service at {url} serves no {scorer!r}: {suggest(scorer, facts)}")
        low, high, self.sees = facts[scorer].low, facts[scorer].high, facts[scorer].sees
        self.takes_conditions = facts[scorer].takes_conditions
        self.low = -float("inf") if low is None else low
        self.high = float("inf") if high is None else high
        self._batch = MOST_ITEMS if self.sees == "group" else batch

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise PromptError if the served scorer refuses the prompts, ScorerError if the service does not answer."""
        lines = [
            PromptLine(
                index=prompt.index,
                text=prompt.text,
                metadata=dict(prompt.metadata),
                conditions=tuple(condition.sha256 for condition in prompt.conditions),
            )
            for prompt in prompts
        ]
        for first in range(0, len(lines), MOST_ITEMS):
            call = CheckCall(scorer=self.name, prompts=tuple(lines[first : first + MOST_ITEMS]))
            try:
                reply = self._post("/v1/check", call, CheckReply)
            except CallError as error:
                raise ScorerError(f"the reward service could not check the prompts: {error}") from None
            if reply.problem:
                raise PromptError(reply.problem)

    def score(
        self,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> Scores:
        """Score B images in requests of `batch`, or of fewer images if a request would have too many pixels.

        Raises:
            ContractError: the answer breaks the protocol.
        """
        seen: Sequence[Sequence[np.ndarray]] = conditions or [()] * len(images)
        parts = self._threads.map(
            lambda rows: self._score_part(rows, images, prompts, metadata, seen), self._requests(images, seen)
        )
        return joined(list(parts))

    def _requests(self, images: np.ndarray, conditions: Sequence[Sequence[np.ndarray]]) -> list[range]:
        """Cut the images into requests, within the limits of their number and of pixels."""
        if self.sees == "group":
            return [range(len(images))]
        own = math.prod(images.shape[1:3])
        requests: list[range] = []
        start, sent = 0, dict[int, int]()
        for row, wanted in enumerate(conditions):
            named = {id(each): math.prod(each.shape[:2]) for each in wanted}
            held, size = sent | named, row + 1 - start
            if row > start and (size + len(held) > self._batch or size * own + sum(held.values()) > REQUEST_PIXELS):
                requests.append(range(start, row))
                start, held = row, named
            sent = held
        return [*requests, range(start, len(images))]

    def _score_part(
        self,
        rows: range,
        images: np.ndarray,
        prompts: Sequence[str],
        metadata: Sequence[Metadata],
        conditions: Sequence[Sequence[np.ndarray]],
    ) -> Scores:
        shared = {id(each): each for row in rows for each in conditions[row]}  # images of one prompt share theirs
        index_of = {key: index for index, key in enumerate(shared)}
        items = tuple(
            Item(
                image=encode_png(images[row]),
                prompt=prompts[row],
                metadata=dict(metadata[row]),
                conditions=tuple(index_of[id(each)] for each in conditions[row]),
            )
            for row in rows
        )
        call = ScoreCall(scorer=self.name, items=items, conditions=tuple(map(encode_png, shared.values())))
        try:
            reply = self._post("/v1/score", call, ScoreReply)
        except CallError as error:
            return Scores.missing(len(rows), str(error))
        if reply.scorer != self.name or len(reply.items) != len(rows):
            got = f"{len(reply.items)} of {reply.scorer!r}"
            raise ContractError(f"a reply must hold {len(rows)} answers of {self.name!r}, got {got}")
        return scores_of(reply.items)

    def _post(self, path: str, message: Message, reply: type[Read]) -> Read:
        headers = {"content-type": self._kind, "accept": self._kind}
        return self._read(
            reply, self._caller.call("POST", path, content=write_message(message, self._kind), headers=headers)
        )

    def _read(self, cls: type[Read], reply: Reply) -> Read:
        return read_message(cls, reply.content, reply.kind)
