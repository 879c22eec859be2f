"""Errors of the status API as problem details (RFC 9457): what is wrong in one sentence, and nothing of the inside."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from protocol.errors import BoardError

log = logging.getLogger(__name__)
MEDIA = "application/problem+json"


class ProblemDetails(BaseModel):
    """RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class Problem(Exception):  # noqa: N818
    """An answer that is an error."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.headers = status, detail, headers

    def response(self) -> JSONResponse:
        """As it goes over the wire."""
        details = ProblemDetails(title=HTTPStatus(self.status).phrase, status=self.status, detail=self.detail)
        return JSONResponse(details.model_dump(), self.status, headers=self.headers, media_type=MEDIA)


def _documented(status: int, description: str) -> dict[str, Any]:
    schema = ProblemDetails.model_json_schema()
    return {"description": f"{HTTPStatus(status).phrase}: {description}", "content": {MEDIA: {"schema": schema}}}


PROBLEMS: dict[int, dict[str, Any]] = {
    status: _documented(status, description)
    for status, description in {
        401: "the bearer token is missing or wrong",
        403: "the server was started without a token, so it controls nothing",
        404: "no such run, pool, command or record",
        409: "the run cannot do this now",
        411: "the body does not say its length",
        413: "the body is too large",
        421: "the server is not known by this name",
        422: "an argument breaks its rule",
        429: "too many event streams",
        503: "the board does not answer",
    }.items()
}


def add_problem_handlers(app: FastAPI) -> None:
    """Every error of the application becomes a problem."""

    @app.exception_handler(Problem)
    async def on_problem(request: Request, problem: Problem) -> JSONResponse:  # noqa: ARG001
        return problem.response()

    @app.exception_handler(BoardError)
    async def on_board(request: Request, error: BoardError) -> JSONResponse:  # noqa: ARG001
        log.warning("%s", error)
        return Problem(503, "the board does not answer; the run itself may well go on").response()

    @app.exception_handler(RequestValidationError)
    async def on_input(request: Request, error: RequestValidationError) -> JSONResponse:  # noqa: ARG001
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return Problem(422, f"{place}: {first['msg']}").response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:  # noqa: ARG001
        return Problem(error.status_code, str(error.detail), dict(error.headers or {})).response()

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Problem(500, "the server made a mistake; its log says more").response()
