"""The HTTP reward service: this process's scorers for actors on other machines. `rewards.http.wire` is its protocol.

    app = make_app({"ocr": ScorerProcess("ocr", {}, deadline_s=300)}, access)      # `flowcredit serve-rewards ocr`

A scorer scores one request at a time, in a process of its own. If a request would make more than `max_waiting` images
wait, or if other requests hold too many bytes in memory, it is answered with status 503, and the client retries later.
A request that is too large by itself is refused. An image that cannot be read or scored, or that is too large, fails
alone. A scorer that does not answer in time is started again.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from fastapi import APIRouter, FastAPI, Request, Response

from deploy.api.auth import Access
from deploy.api.middleware import RequestGuard
from deploy.api.problems import Problem, add_problem_handlers, documented
from deploy.api.scorer_process import ScorerSlot
from protocol.errors import ContractError, InputError
from protocol.messages import ConditionImage, Prompt, Scores
from rewards.http.wire import (
    JSON,
    MSGPACK,
    REQUEST_PIXELS,
    CheckCall,
    CheckReply,
    Message,
    Read,
    ScoreCall,
    ScoreReply,
    ScorerFacts,
    ScorerList,
    answers_of,
    finite,
    read_message,
    write_message,
)
from rewards.images import ImageError, decode_image, pixels_of
from rewards.scorer import CheckedScorer, Piece, score_pieces
from rewards.scores import partly, patched

log = logging.getLogger(__name__)
MIB = 1024 * 1024
MOST_PIXELS = 16 * MIB
"""Largest number of pixels of one image: 4096 x 4096."""
PIXELS_AT_ONCE = 4 * MOST_PIXELS
"""Largest number of pixels that are decoded at one time for a scorer, condition images included; a larger request is
scored in portions."""
BODY_BYTES = 64 * MIB
"""Largest body of a request."""
BODIES_HELD = 8
"""Number of largest bodies that the service may hold at one time."""


class ServedScorer:
    """One scorer, whose turn it is, and its counts of images."""

    def __init__(self, slot: ScorerSlot, *, max_waiting: int) -> None:
        """Serve the scorer in `slot`; at most `max_waiting` images wait for it."""
        self.slot = slot
        self.waiting = self.scored = self.missing = 0
        self._max_waiting = max_waiting
        self._turn = asyncio.Lock()

    async def check(self, call: CheckCall, request: Request) -> str:
        """Return why the prompts of a call cannot be scored; empty if they can."""
        async with self._turn_of(request):
            return await self.slot.run(_problem_of, call)

    async def score(self, call: ScoreCall, request: Request) -> Scores:
        """Score the images of a call once the calls before it are done.

        Raises:
            Problem: 413, the call has more images than may wait, or more pixels than `REQUEST_PIXELS`; 503, too many
                images wait already.
        """
        size = len(call.items)
        if size > self._max_waiting:
            raise Problem(413, f"a request may have {self._max_waiting} images, got {size}: send fewer at once")
        pixels = await asyncio.to_thread(_pixels_to_score, call)
        if pixels > REQUEST_PIXELS:
            raise Problem(413, f"a request may have {REQUEST_PIXELS} pixels in all, got {pixels}: send fewer at once")
        if self.waiting + size > self._max_waiting:
            raise Problem(503, f"{self.waiting} images already wait for {call.scorer}: try again later")
        self.waiting += size
        try:
            async with self._turn_of(request):
                scores = await self.slot.run(_score_items, call)
        finally:
            self.waiting -= size
        self.scored += size
        self.missing += int((~scores.valid).sum())
        return scores

    @asynccontextmanager
    async def _turn_of(self, request: Request) -> AsyncIterator[None]:
        """Wait for the turn of a request, unless its client leaves, whose position in the line is then free."""
        turn, left = asyncio.ensure_future(self._turn.acquire()), asyncio.ensure_future(request.receive())
        await asyncio.wait({turn, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not turn.done():
            turn.cancel()
            raise Problem(503, "the client has left")
        try:
            yield
        finally:
            self._turn.release()


def make_app(scorers: Mapping[str, ScorerSlot], access: Access, *, max_waiting: int = 1024) -> FastAPI:
    """Make the service.

    Args:
        scorers: the slots of the scorers to serve, by name.
        access: the access rights; the route of its health needs no token.
        max_waiting: images that may wait for one scorer.

    Returns:
        The application.
    """
    app = FastAPI(title="flowcredit reward service", version="1", docs_url=None, redoc_url=None)
    app.state.reading = asyncio.Lock()
    app.state.served = {name: ServedScorer(slot, max_waiting=max_waiting) for name, slot in scorers.items()}
    add_problem_handlers(app)
    admit = access.admit if access.to_call else None
    app.add_middleware(
        RequestGuard, max_body_bytes=BODY_BYTES, bodies_held=BODIES_HELD, hosts=access.hosts, admit=admit
    )
    app.include_router(_open)
    app.include_router(_calls, dependencies=access.to_call)
    return app


def _body(cls: type[Message]) -> dict[str, Any]:
    schema = cls.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}, MSGPACK: {}}}}


_open = APIRouter(responses=documented())
_calls = APIRouter(responses=documented(400, 401, 404, 500, 504))


@_open.get("/v1/health")
async def health(request: Request) -> dict[str, Any]:
    """Return the counts of waiting, scored and missing images of each scorer, and how often its process started again.

    A scorer whose newest call got no answer is `degraded`, and so is its service.
    """
    served: dict[str, ServedScorer] = request.app.state.served
    counts = {
        name: {
            "status": _health(item.slot.is_degraded),
            "waiting": item.waiting,
            "scored": item.scored,
            "missing": item.missing,
            "restarts": item.slot.restarts,
        }
        for name, item in served.items()
    }
    return {"status": _health(any(item.slot.is_degraded for item in served.values())), "scorers": counts}


@_calls.get("/v1/scorers", response_model=ScorerList)
async def scorer_list(request: Request) -> Response:
    """Return the served scorers with the range of their values."""
    served: dict[str, ServedScorer] = request.app.state.served
    facts = tuple(
        ScorerFacts(
            name=name,
            low=finite(facts.low),
            high=finite(facts.high),
            sees=facts.sees,
            takes_conditions=facts.takes_conditions,
        )
        for name, facts in ((name, item.slot.facts) for name, item in served.items())
    )
    return _reply(ScorerList(scorers=facts), request)


@_calls.post("/v1/check", response_model=CheckReply, openapi_extra=_body(CheckCall))
async def check(request: Request) -> Response:
    """Answer whether prompts can be scored."""
    call = await _read(CheckCall, request)
    problem = await _find(request, call.scorer).check(call, request)
    return _reply(CheckReply(problem=problem), request)


@_calls.post("/v1/score", response_model=ScoreReply, openapi_extra=_body(ScoreCall))
async def score(request: Request) -> Response:
    """Return the scores of images, one answer for each."""
    call = await _read(ScoreCall, request)
    scores = await _find(request, call.scorer).score(call, request)
    return _reply(ScoreReply(scorer=call.scorer, items=answers_of(scores)), request)


def _health(is_degraded: bool) -> str:  # noqa: FBT001
    return "degraded" if is_degraded else "ok"


def _problem_of(scorer: CheckedScorer, call: CheckCall) -> str:
    prompts = [
        Prompt(
            index=line.index,
            text=line.text,
            metadata=line.metadata,
            conditions=tuple(ConditionImage(path="", sha256=sha256) for sha256 in line.conditions),
        )
        for line in call.prompts
    ]
    try:
        scorer.check(prompts)
    except InputError as error:
        return str(error)
    return ""


def _score_items(scorer: CheckedScorer, call: ScoreCall) -> Scores:
    """Score all images. An unreadable image has no score; if the scorer breaks its contract, no image has one."""
    if scorer.sees == "group" and _pixels_to_score(call) > PIXELS_AT_ONCE:
        return Scores.missing(
            len(call.items), f"a group may have {PIXELS_AT_ONCE} pixels in all: send fewer or smaller"
        )
    reasons = ["not scored"] * len(call.items)
    scored: list[tuple[list[int], Scores]] = []
    try:
        for portion in _decoded(call, reasons, takes_conditions=scorer.takes_conditions):
            pieces = [
                Piece(
                    rows=(0,),
                    prompts=(call.items[row].prompt,),
                    metadata=(call.items[row].metadata,),
                    conditions=(conditions,),
                )
                for row, (_, conditions) in portion.items()
            ]
            images = [image[None] for image, _ in portion.values()]
            scored.append((list(portion), score_pieces(scorer, pieces, images)))
    except ContractError as error:
        log.exception("a scorer broke its contract")
        return Scores.missing(len(reasons), str(error))
    scores = partly([float("nan")] * len(reasons), reasons)
    for rows, answer in scored:
        scores = patched(scores, rows, answer)
    return scores


def _pixels_to_score(call: ScoreCall) -> int:
    """Count the pixels of all images and condition images of a call that will be decoded."""

    def pixels(data: bytes) -> int:
        try:
            found = pixels_of(data)
        except ImageError:
            return 0
        return found if found <= MOST_PIXELS else 0

    return sum(map(pixels, (*(item.image for item in call.items), *call.conditions)))


Seen = tuple[np.ndarray, tuple[np.ndarray, ...]]
"""An image and its condition images."""


def _decoded(call: ScoreCall, reasons: list[str], *, takes_conditions: bool) -> Iterator[dict[int, Seen]]:
    """Yield the images of a call by row, at most `PIXELS_AT_ONCE` at a time; `reasons` receives why others fail."""
    portion: dict[int, Seen] = {}
    shown: dict[int, np.ndarray] = {}
    left = PIXELS_AT_ONCE
    for row, item in enumerate(call.items):
        wanted = item.conditions if takes_conditions else ()
        try:
            pixels = {index: pixels_of(call.conditions[index]) for index in wanted}
            own = pixels_of(item.image)
            if own + sum(pixels.values()) > PIXELS_AT_ONCE:
                raise ImageError(f"an image and its condition images may have {PIXELS_AT_ONCE} pixels in all")
            if own + sum(pixels[index] for index in pixels.keys() - shown.keys()) > left and portion:
                yield portion
                portion, shown, left = {}, {}, PIXELS_AT_ONCE
            for index in pixels.keys() - shown.keys():
                shown[index] = decode_image(call.conditions[index], most_pixels=MOST_PIXELS)
                shown[index].flags.writeable = False
                left -= pixels[index]
            image = decode_image(item.image, most_pixels=MOST_PIXELS)
            left -= own
            portion[row] = image, tuple(shown[index] for index in wanted)
        except ImageError as error:
            reasons[row] = str(error)
    if portion:
        yield portion


def _find(request: Request, name: str) -> ServedScorer:
    served: dict[str, ServedScorer] = request.app.state.served
    if name not in served:
        raise Problem(404, f"this service has no scorer {name!r}, only {sorted(served)}")
    return served[name]


async def _read(cls: type[Read], request: Request) -> Read:
    body, kind = await request.body(), request.headers.get("content-type", "").split(";")[0]
    try:
        async with request.app.state.reading:  # one at a time: a message takes more memory than its body
            return await asyncio.to_thread(read_message, cls, body, kind)
    except ContractError as error:
        raise Problem(400, str(error)) from None


def _reply(message: Message, request: Request) -> Response:
    kind = MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
    return Response(write_message(message, kind), media_type=kind)
