"""The routes of a run's history. A server that reads a board has curves only: everything else is in run folders."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import FileResponse, StreamingResponse

from deploy.api.history.configs import Differences, RunConfigView, compare, view
from deploy.api.history.curves import MOST_POINTS, POINTS, By, Curves
from deploy.api.history.evaluations import Evaluations, GalleryImages, images_of, scores
from deploy.api.problems import Problem, documented
from deploy.folder.names import CHECKPOINTS, CONFIG, EVENTS, METRICS
from protocol.errors import RunFolderError
from protocol.ground.files import ADAPTER_FILE, MANIFEST, by_iteration
from protocol.status import RUN_ID

MOST_RUNS = 12
"""Largest number of runs in one report, and in one comparison on the page."""
JSON, BYTES = "application/json", "application/octet-stream"
PIECE = 1 << 16
"""Bytes of a file that are read at a time."""
FILES = {"metrics": METRICS, "config": CONFIG, "events": EVENTS}
RunName = Annotated[str, Path(pattern=RUN_ID, description="A run's name, as GET /runs lists it.")]
Axis = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False)]
Listed = Annotated[str, Query(pattern=RUN_ID)]

history = APIRouter(responses=documented(401, 502))


@history.get("/runs/{run}/curves", response_model=Curves, responses=documented(404, 422))
async def curves(
    request: Request,
    run: RunName,
    names: Annotated[str, Query(max_length=2_000, description="Names or patterns such as `reward/*`, with commas.")],
    by: By = "iteration",
    points: Annotated[int, Query(ge=10, le=MOST_POINTS, description="Most points of a curve.")] = POINTS,
    start: Axis = None,
    end: Axis = None,
) -> Response:
    """Return metrics of the whole run, or of a part of the axis, by `iteration` or training `seconds`.

    They have at most `points` points, each the mean over an equal part with its lowest and highest value. The server
    reads each line once and keeps the numbers of the 12 runs that were asked for last.
    """
    status = await request.app.state.cache.status(run)
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    found = await request.app.state.curves.curves(status, wanted, by=by, points=points, window=(start, end))
    return Response(await asyncio.to_thread(found.model_dump_json, exclude_none=True), media_type=JSON)


@history.get("/configs", responses=documented(404, 422))
async def configs(
    request: Request,
    run: Annotated[list[Listed] | None, Query(max_length=500, description="Default: all runs.")] = None,
) -> Differences:
    """Return the differences among the configs of runs, and which runs differ only in the seed."""
    names = list(dict.fromkeys(run or ())) or [status.run for status in await request.app.state.cache.runs()]
    found = {name: await request.app.state.source.folder(name) for name in names[:500]}
    for name in [name for name, folder in found.items() if folder is None]:
        await request.app.state.cache.status(name)  # 404 for an unknown run; a board has no folders
    folders = {name: folder for name, folder in found.items() if folder}
    return await asyncio.to_thread(compare, folders)


@history.get("/runs/{run}/config", responses=documented(404, 422))
async def config(request: Request, run: RunName) -> RunConfigView:
    """Return a run's config: its file, and every value by its key."""
    folder = await _folder(request, run)
    try:
        return await asyncio.to_thread(view, folder)
    except RunFolderError as error:
        raise Problem(404, str(error)) from None


@history.get("/runs/{run}/evaluations", responses=documented(404, 422))
async def evaluations(
    request: Request,
    run: RunName,
    reading: Annotated[str, Query(max_length=200, description="`score`, a scorer, or a component.")] = "score",
) -> Evaluations:
    """Return held-out scores by prompt and evaluation, and which evaluations have images."""
    folder = await _folder(request, run)
    return await asyncio.to_thread(scores, folder, reading)


@history.get("/runs/{run}/gallery/{iteration}", responses=documented(404, 422))
async def gallery(request: Request, run: RunName, iteration: Annotated[int, Path(ge=0, le=10**9)]) -> GalleryImages:
    """Return the images of an evaluation with their prompts and scores."""
    found = await asyncio.to_thread(images_of, await _folder(request, run), iteration)
    if found is None:
        raise Problem(404, "no images of this iteration can be read; `galleries` of the run's evaluations lists them")
    return found


@history.get(
    "/runs/{run}/files/{name}",
    responses={**documented(404, 422), 200: {"content": {BYTES: {}}}},
    response_class=Response,
)
async def file(request: Request, run: RunName, name: Literal["adapter", "metrics", "config", "events"]) -> Response:
    """Download a file of a run: the adapter of its newest whole checkpoint, its metrics, its config or its events."""
    folder = await _folder(request, run)
    if name == "adapter":
        found = await asyncio.to_thread(newest_adapter, folder)
        if found is None:
            raise Problem(404, "the run has no whole checkpoint yet")
        return FileResponse(found, filename=f"{run}_{found.parent.name}.safetensors", media_type=BYTES)
    path = folder / FILES[name]
    if not path.is_file():
        raise Problem(404, f"the run has no {FILES[name]}")
    headers = {"Content-Disposition": f'attachment; filename="{run}_{FILES[name]}"'}
    return StreamingResponse(_held(path), headers=headers, media_type=BYTES)


@history.get(
    "/report", responses={**documented(404, 422), 200: {"content": {"text/html": {}}}}, response_class=Response
)
async def report(request: Request, run: Annotated[list[Listed], Query(min_length=1, max_length=MOST_RUNS)]) -> Response:
    """Download the report of 1 to 12 runs, as `flowcredit report` writes it; the server draws one report at a time."""
    from deploy.report.page import report_of
    from deploy.report.runs import read_runs

    folders = [await _folder(request, name) for name in dict.fromkeys(run)]
    async with request.app.state.drawing:
        try:
            text = await asyncio.to_thread(lambda: report_of(read_runs(folders)))
        except RunFolderError as error:
            raise Problem(404, str(error)) from None
    name = run[0] if len(folders) == 1 else "runs"
    headers = {"Content-Disposition": f'attachment; filename="{name}_report.html"'}
    return Response(text, media_type="text/html", headers=headers)


def newest_adapter(run: FilePath) -> FilePath | None:
    """Find the adapter's file in a run's newest whole checkpoint; None if there is none."""
    newest_first = reversed(by_iteration(run / CHECKPOINTS).values())
    whole = (folder / ADAPTER_FILE for folder in newest_first if (folder / MANIFEST).is_file())
    return next(filter(FilePath.is_file, whole), None)


async def _folder(request: Request, run: str) -> FilePath:
    await request.app.state.cache.status(run)
    folder: FilePath | None = await request.app.state.source.folder(run)
    if folder is None:
        raise Problem(404, "this server reads a board, which has no files: `flowcredit serve FOLDER` shows them")
    return folder


def _held(path: FilePath) -> Iterator[bytes]:
    """Read what a file holds now. A living run adds lines meanwhile, so its length cannot be promised."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left > 0 and (piece := file.read(min(left, PIECE))):
            left -= len(piece)
            yield piece
