"""The status API and its page: the status of runs, and commands to them.

It reads boards and run folders, never the training processes: it answers while a learner is busy or dead, and one
server serves many runs. Reading needs the bearer token unless the server listens on loopback; control always needs it.
Errors are problem details (RFC 9457).
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path as FilePath
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from fastapi.responses import FileResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel

from deploy.api.auth import Access
from deploy.api.cache import StatusCache
from deploy.api.history.curves import LINES_AT_ONCE, CurveCache, is_wanted
from deploy.api.history.routes import JSON, RunName, history
from deploy.api.middleware import RequestGuard
from deploy.api.problems import Problem, add_problem_handlers, documented
from deploy.api.prometheus import CONTENT_TYPE, exposition
from deploy.api.source import Source
from deploy.api.sse import Position, event_stream
from deploy.monitor.health import refusal_of
from deploy.monitor.trajectories import sheet
from protocol.commands import Command, Count, new_command
from protocol.errors import ContractError
from protocol.status import (
    FIXED_SIZE,
    POOL,
    MetricLine,
    RunStatus,
    RunSummary,
    TrajectoryRecord,
    summary_of,
)

ABOUT = """The status of training runs, and commands to them. The server reads boards and run folders, never the
training processes. Errors are problem details (RFC 9457).

**Access.** Control needs the bearer token: `FLOWCREDIT_TOKEN` or `--token-file`, at least 16 ASCII characters. On
loopback reading needs none, and the server answers only to `localhost`, `127.0.0.1`, `[::1]` and the names of
`--allow-host`. Elsewhere everything needs the token except the page's own files, `/healthz`, `/readyz` and
`/openapi.json`.

**Connections**, also those of `flowcredit serve-rewards`. The head of a request must arrive within 10 s, its body
within 10 s and one more for each MiB. At most 512 connections are open, or half of the files that the process may open;
then the client with most unfinished requests loses its oldest. Of one client at most 64 bodies arrive at a time; then
the oldest is answered with 503. A body is read only with the token that it needs. What clients can cause is logged at
most once in 10 s.
"""
PAGE = FilePath(__file__).parent / "page"
FILES = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*") if path.is_file()}
"""The files of the page by name; the server serves no others."""
STREAMS = 64
"""Largest number of event streams that one server keeps open."""
BODY_BYTES = 4_096
"""Largest body of a request."""
BODIES_HELD = 64
"""Number of largest bodies that the server may hold at one time."""
PoolName = Annotated[str, Path(pattern=POOL, description="`rollout`, `reward/<scorer>` or `learner`.")]
CommandName = Annotated[str, Path(pattern=r"^[0-9a-f]{32}$")]
Iteration = Annotated[int, Path(ge=1, le=10**9)]
Since = Annotated[int, Query(ge=0, le=10**12, description="Return only entries after this number.")]


class Size(BaseModel, extra="forbid"):
    """The desired size of a pool."""

    count: Count


class Order(BaseModel, extra="forbid"):
    """A command to a run."""

    command: Literal["pause", "resume", "checkpoint", "stop"]


class Health(BaseModel):
    """The server is up."""

    status: Literal["ok"] = "ok"


def make_app(source: Source, access: Access) -> FastAPI:
    """Make the application over a source of status."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001
        yield
        await source.close()

    app = FastAPI(
        title="flowcredit status",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        description=ABOUT,
    )
    app.state.source, app.state.cache, app.state.streams = source, StatusCache(source), 0
    app.state.curves, app.state.drawing = CurveCache(source), asyncio.Lock()
    add_problem_handlers(app)
    app.add_middleware(
        RequestGuard, max_body_bytes=BODY_BYTES, bodies_held=BODIES_HELD, hosts=access.hosts, admit=access.admit
    )
    app.include_router(_open)
    app.include_router(_reading, dependencies=access.to_read)
    app.include_router(history, dependencies=access.to_read)
    app.include_router(_control, dependencies=access.to_control)
    return app


_open = APIRouter()
_reading = APIRouter(responses=documented(401, 502))
_control = APIRouter(responses=documented(401, 403, 502))


@_open.get("/", include_in_schema=False)
async def page() -> FileResponse:
    """Return the page; it holds no data and fetches everything from the API."""
    return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})


@_open.get("/static/{name:path}", include_in_schema=False)
async def page_file(name: str) -> FileResponse:
    """Return a file of the page."""
    if name not in FILES:
        raise Problem(404, "the page has no such file")
    return FileResponse(FILES[name], headers={"Cache-Control": "no-cache"})


@_open.get("/healthz", responses=documented())
async def healthz() -> Health:
    """Answer that the server is up."""
    return Health()


@_open.get("/readyz", responses=documented())
async def readyz(request: Request) -> Health:
    """Answer whether the board or the folder can be read."""
    await request.app.state.source.ping()
    return Health()


@_reading.get("/runs")
async def runs(request: Request, response: Response) -> list[RunSummary]:
    """Return all runs that can be read, newest first, each with its health in one sentence.

    The header `Age` holds the seconds since they were read.
    """
    cache: StatusCache = request.app.state.cache
    found = await cache.runs()
    response.headers["Age"] = str(cache.list_age_s)
    return [summary_of(status) for status in found]


@_reading.get(
    "/runs/{run}", response_model=RunStatus, responses=documented(404, 422), response_description="The status of a run."
)
async def run_status(request: Request, run: RunName) -> Response:
    """Return one run, from a cache; `stale_since` is set if neither the run nor its board gives a sign of life.

    It has phase, iteration, time left, the newest metrics with the reward's trend, staleness, queues, bottleneck,
    pools, actors, conditions, last errors and recorded iterations.
    """
    return Response(await request.app.state.cache.json(run), media_type=JSON)


@_reading.get("/runs/{run}/metrics", responses=documented(404, 422))
async def metrics(
    request: Request,
    run: RunName,
    since: Since = 0,
    names: Annotated[str | None, Query(max_length=2_000, description="Names, prefixes or patterns with `*`.")] = None,
    limit: Annotated[int, Query(ge=1, le=LINES_AT_ONCE)] = LINES_AT_ONCE,
) -> list[MetricLine]:
    """Return metric lines after `since`, oldest first, with the names of docs/metrics.md; `reward/` is a prefix."""
    await request.app.state.cache.status(run)
    lines: list[MetricLine] = await request.app.state.source.lines(run, since=since, limit=limit)
    if names is None:
        return lines
    wanted = ["iteration", *(name.strip() for name in names.split(","))]
    return [
        MetricLine(seq=line.seq, values={k: v for k, v in line.values.items() if is_wanted(k, wanted)})
        for line in lines
    ]


async def stream_slot(request: Request, run: RunName) -> AsyncIterator[None]:
    """Hold one of the `STREAMS` slots while a run's event stream is open."""
    state = request.app.state
    await state.cache.status(run)
    if state.streams >= STREAMS:
        raise Problem(429, f"at most {STREAMS} event streams are open at one time")
    state.streams += 1
    try:
        yield
    finally:
        state.streams -= 1


@_reading.get(
    "/runs/{run}/events",
    response_class=EventSourceResponse,
    dependencies=[Depends(stream_slot)],
    responses=documented(404, 422, 429),
)
async def events(
    request: Request, run: RunName, position: Annotated[Position, Query()]
) -> AsyncIterator[ServerSentEvent]:
    """Stream `status` when it changes, `metrics` lines after `since` and `event`s after `since_event`.

    A board has a run's newest 1,000 events, the folder of an ended run 200.
    """
    async for event in event_stream(request.app.state.cache, request.app.state.source, run, position):
        yield event


@_reading.get(
    "/runs/{run}/trajectories/{iteration}", responses={**documented(404, 422), 200: {"content": {"image/png": {}}}}
)
async def trajectory_sheet(request: Request, run: RunName, iteration: Iteration) -> Response:
    """Return a PNG: a row of clean-image estimates for each recorded trajectory, with its rewards and step rewards."""
    record = await _record(request, run, iteration)
    try:
        return Response(await asyncio.to_thread(sheet, record), media_type="image/png")
    except ContractError as error:
        raise Problem(404, f"the record of this iteration is damaged: {error}") from None


@_reading.get("/runs/{run}/trajectories/{iteration}/record", responses=documented(404, 422))
async def trajectory_record(request: Request, run: RunName, iteration: Iteration) -> TrajectoryRecord:
    """Return the same record as data: rewards, calibrated values, step rewards, advantages, and a PNG of the images."""
    return await _record(request, run, iteration)


@_reading.get("/runs/{run}/commands/{command}", responses=documented(404, 422))
async def command_outcome(request: Request, run: RunName, command: CommandName) -> Command:
    """Return the state of a command (`accepted`, `working`, `done`, `failed`, `superseded`) and its outcome."""
    await request.app.state.cache.status(run)
    found = await request.app.state.source.command(run, command)
    if found is None:
        raise Problem(404, "no such command; outcomes of old ones are dropped")
    return found


@_reading.get("/metrics", responses={200: {"content": {CONTENT_TYPE: {}}}}, response_class=Response)
async def prometheus(request: Request) -> Response:
    """Return the metrics of all runs for Prometheus; of an ended run those that its status holds."""
    return Response(exposition(await request.app.state.cache.runs()), media_type=CONTENT_TYPE)


@_control.put("/runs/{run}/actors/{pool:path}", status_code=202, responses=documented(400, 404, 409, 422, 429))
async def scale(request: Request, response: Response, run: RunName, pool: PoolName, size: Size) -> Command:
    """Set the desired size of a pool, with `{"count": 6}`; the answer's `id` leads to the outcome."""
    status = await _running(request, run)
    found = next((held for held in status.pools if held.name == pool), None)
    if found is None:
        raise Problem(404, f"no such pool: the pools are {', '.join(held.name for held in status.pools) or 'none'}")
    if not found.is_resizable:
        raise Problem(409, f"{pool} cannot be scaled: {FIXED_SIZE}")
    return await _send(request, response, run, new_command("scale", pool=pool, count=size.count))


@_control.post("/runs/{run}/commands", status_code=202, responses=documented(400, 404, 409, 422, 429))
async def order(request: Request, response: Response, run: RunName, body: Order) -> Command:
    """Pause, resume, checkpoint or stop, with `{"command": "pause"}`; the answer's `id` leads to the outcome."""
    await _running(request, run)
    return await _send(request, response, run, new_command(body.command))


async def _send(request: Request, response: Response, run: str, command: Command) -> Command:
    await request.app.state.source.send(run, command)
    response.headers["Location"] = f"/runs/{run}/commands/{command.id}"
    return command


async def _running(request: Request, run: str) -> RunStatus:
    status: RunStatus = await request.app.state.cache.status(run, must_answer=True)
    if reason := refusal_of(status):
        raise Problem(409, f"the run {reason}")
    return status


async def _record(request: Request, run: str, iteration: int) -> TrajectoryRecord:
    await request.app.state.cache.status(run)
    found = await request.app.state.source.record(run, iteration)
    if found is None:
        raise Problem(404, "no trajectories were recorded at this iteration; `trajectories` of the run lists them")
    return found
