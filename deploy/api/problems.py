"""Errors of both HTTP services as problem details (RFC 9457): one sentence on what is wrong, no internals."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from deploy.board.board import QueueFullError
from protocol.errors import BoardError, DamagedError, printable

log = logging.getLogger(__name__)
MEDIA = "application/problem+json"


class ProblemDetails(BaseModel):
    """The body of an error, after RFC 9457."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str


class Problem(Exception):  # noqa: N818
    """An error that a client sees, with its HTTP status."""

    def __init__(self, status: int, detail: str, headers: dict[str, str] | None = None) -> None:
        """
        Args:
            detail: one sentence on what is wrong.
        """
        super().__init__(detail)
        self.status, self.detail, self.headers = status, printable(detail), headers

    def response(self) -> JSONResponse:
        details = ProblemDetails(title=HTTPStatus(self.status).phrase, status=self.status, detail=self.detail)
        return JSONResponse(details.model_dump(), self.status, headers=self.headers, media_type=MEDIA)


DESCRIPTIONS = {
    400: "the body does not match its content type",
    401: "the bearer token is missing or wrong",
    403: "the server was started without a token, so it takes no commands",
    404: "no such run, pool, command, record or scorer",
    409: "the run cannot do this now",
    411: "the body does not state its length",
    413: "the body is too large",
    421: "the server is not known by this name",
    422: "an argument breaks its rule",
    429: "too many event streams, or too many commands that wait for the run",
    500: "the server or a scorer failed",
    502: "the board answers, but what it holds of the run cannot be read",
    503: "the board does not answer, or too many images wait: try again later",
    504: "the scorer did not answer in time or ended, and starts again",
}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI `responses` of a route for these errors and for the errors of every route."""
    schema = ProblemDetails.model_json_schema()
    return {
        status: {
            "description": f"{HTTPStatus(status).phrase}: {DESCRIPTIONS[status]}",
            "content": {MEDIA: {"schema": schema}},
        }
        for status in (*statuses, 411, 413, 421, 503)
    }


def add_problem_handlers(app: FastAPI) -> None:
    """Answer every error of an application with a problem."""

    @app.exception_handler(Problem)
    async def on_problem(request: Request, problem: Problem) -> JSONResponse:  # noqa: ARG001
        return problem.response()

    @app.exception_handler(QueueFullError)
    async def on_full_queue(request: Request, error: QueueFullError) -> JSONResponse:  # noqa: ARG001
        return Problem(429, str(error)).response()

    @app.exception_handler(DamagedError)
    async def on_damaged(request: Request, error: DamagedError) -> JSONResponse:  # noqa: ARG001
        return Problem(502, str(error)).response()

    @app.exception_handler(BoardError)
    async def on_board(request: Request, error: BoardError) -> JSONResponse:  # noqa: ARG001
        log.warning("%s", error)
        return Problem(503, "the board does not answer; the run itself may still go on").response()

    @app.exception_handler(RequestValidationError)
    async def on_input(request: Request, error: RequestValidationError) -> JSONResponse:  # noqa: ARG001
        first = error.errors()[0]
        argument = ".".join(str(part)[:60] for part in first["loc"])
        return Problem(422, f"{argument}: {first['msg']}").response()

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> JSONResponse:  # noqa: ARG001
        return Problem(error.status_code, str(error.detail), dict(error.headers or {})).response()

    @app.exception_handler(Exception)
    async def on_bug(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return Problem(500, "the server failed; see its log").response()
