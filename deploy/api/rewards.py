"""The HTTP reward service: this process's scorers for actors on other machines. `rewards.http.wire` is its language.

    app = make_app({"ocr": build_scorer("ocr")})            # what `flowcredit serve-rewards ocr` runs

A scorer scores one request at a time, on a thread of its own; requests beyond `max_waiting` images are sent away with
status 503, which the client takes as "later". An image that cannot be read or scored fails alone.
"""

import asyncio
import hmac
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response

from protocol.errors import ContractError, FlowcreditError, InputError
from protocol.messages import Scores
from rewards.answers import partly, patched
from rewards.http.wire import (
    JSON,
    MSGPACK,
    CheckCall,
    CheckReply,
    Message,
    Read,
    ScoreCall,
    ScoreReply,
    ScorerList,
    answers_of,
    facts_of,
    prompt_of,
    read_message,
    write_message,
)
from rewards.images import ImageError, decode_image
from rewards.pieces import Piece, score_pieces
from rewards.scorer import CheckedScorer

log = logging.getLogger(__name__)
MIB = 1024 * 1024


class RefusalError(FlowcreditError):
    """A request that is not served, with its HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ServedScorer:
    """One scorer with its turn and its counts; made by `make_app`."""

    def __init__(self, scorer: CheckedScorer, *, max_waiting: int) -> None:
        self.scorer = scorer
        self.waiting = self.scored = self.missing = 0
        self._max_waiting = max_waiting
        self._turn = asyncio.Lock()

    async def score(self, call: ScoreCall) -> Scores:
        """Scores of a call's images, when it is this call's turn.

        Raises:
            RefusalError: too many images wait already.
        """
        size = len(call.items)
        if self.waiting and self.waiting + size > self._max_waiting:
            raise RefusalError(f"{self.waiting} images wait for {call.scorer} already: come again later", 503)
        self.waiting += size
        try:
            async with self._turn:
                scores = await asyncio.to_thread(_score_items, self.scorer, call)
        finally:
            self.waiting -= size
        self.scored += size
        self.missing += int((~scores.valid).sum())
        return scores


def make_app(
    scorers: Mapping[str, CheckedScorer], *, max_waiting: int = 1024, max_body_mib: int = 256, token: str | None = None
) -> FastAPI:
    """The service.

    Args:
        scorers: what it serves, by name.
        max_waiting: images that may wait for one scorer.
        max_body_mib: size of one request.
        token: bearer token that callers must show; none asks for none.
    """
    app = FastAPI(title="flowcredit reward service", version="1")
    served = {name: ServedScorer(scorer, max_waiting=max_waiting) for name, scorer in scorers.items()}

    @app.exception_handler(FlowcreditError)
    async def refuse(request: Request, error: FlowcreditError) -> Response:
        status = error.status if isinstance(error, RefusalError) else 400
        log.warning("%s %s: %s", request.method, request.url.path, error)
        return Response(str(error), status_code=status, media_type="text/plain")

    @app.get("/v1/health", tags=["status"])
    async def health() -> dict[str, Any]:
        """Each scorer's waiting, scored and missing images; asks for no token."""
        counts = {
            name: {"waiting": item.waiting, "scored": item.scored, "missing": item.missing}
            for name, item in served.items()
        }
        return {"status": "ok", "scorers": counts}

    @app.get("/v1/scorers", response_model=ScorerList)
    async def scorer_list(request: Request) -> Response:
        """What is served, and the range of each."""
        _require_token(request, token)
        facts = tuple(facts_of(name, item.scorer.low, item.scorer.high) for name, item in served.items())
        return _reply(ScorerList(scorers=facts), request)

    @app.post("/v1/check", response_model=CheckReply, openapi_extra=_body(CheckCall))
    async def check(request: Request) -> Response:
        """Whether prompts can be scored."""
        _require_token(request, token)
        call = await _read(CheckCall, request, max_body_mib)
        scorer = _find(served, call.scorer).scorer
        try:
            await asyncio.to_thread(scorer.check, [prompt_of(line) for line in call.prompts])
        except InputError as error:
            return _reply(CheckReply(problem=str(error)), request)
        return _reply(CheckReply(), request)

    @app.post("/v1/score", response_model=ScoreReply, openapi_extra=_body(ScoreCall))
    async def score(request: Request) -> Response:
        """Scores of images, one answer each."""
        _require_token(request, token)
        call = await _read(ScoreCall, request, max_body_mib)
        scores = await _find(served, call.scorer).score(call)
        return _reply(ScoreReply(scorer=call.scorer, items=answers_of(scores)), request)

    return app


def _score_items(scorer: CheckedScorer, call: ScoreCall) -> Scores:
    """Scores of all images; those that cannot be read are missing, and so are all when the scorer breaks its word."""
    images: dict[int, np.ndarray] = {}
    reasons = [""] * len(call.items)
    for row, item in enumerate(call.items):
        try:
            images[row] = decode_image(item.image)
        except ImageError as error:
            reasons[row] = str(error)
    nothing = partly([float("nan")] * len(reasons), [reason or "not scored" for reason in reasons])
    if not images:
        return nothing
    pieces = [
        Piece(rows=(0,), prompts=(call.items[row].prompt,), metadata=(call.items[row].metadata,)) for row in images
    ]
    try:
        scores = score_pieces(scorer, pieces, [image[None] for image in images.values()])
    except ContractError as error:
        log.exception("a scorer broke its contract")
        return Scores.missing(len(reasons), str(error))
    return patched(nothing, list(images), scores)


def _find(served: Mapping[str, ServedScorer], name: str) -> ServedScorer:
    if name not in served:
        raise RefusalError(f"this service has no scorer {name!r}, only {sorted(served)}", 404)
    return served[name]


def _require_token(request: Request, token: str | None) -> None:
    shown = request.headers.get("authorization", "")
    if token and not hmac.compare_digest(shown.encode(), f"Bearer {token}".encode()):
        raise RefusalError("this service asks for a bearer token: set token_env", 401)


async def _read(cls: type[Read], request: Request, max_body_mib: int) -> Read:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_body_mib * MIB:
            raise RefusalError(
                f"a request must have at most {max_body_mib} MiB, got more: send fewer images at once", 413
            )
        parts.append(part)
    return read_message(cls, b"".join(parts), request.headers.get("content-type", "").split(";")[0])


def _reply(message: Message, request: Request) -> Response:
    kind = MSGPACK if MSGPACK in request.headers.get("accept", "") else JSON
    return Response(write_message(message, kind), media_type=kind)


def _body(cls: type[Message]) -> dict[str, Any]:
    schema = cls.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}, MSGPACK: {}}}}
