"""Records a few trajectories of a run: their clean-image estimates, their rewards and the credit of their steps.

Every `status.trajectories_every` iterations the recorder fetches the first shard of the first group, in a task beside
the loop. The loop never waits for it, and a failure is a warning. At most one recording is in progress; while it lasts,
the next one is left out.
"""

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from deploy.folder.heldout import rounded
from deploy.monitor.summary import number
from learner.loop.evaluate import mean_of
from learner.loop.groups import Observer
from learner.loop.stream import GroupStream
from protocol.config.run import RunConfig
from protocol.errors import ContractError
from protocol.ground.files import write_whole
from protocol.messages import Credit, Excerpt, ScoredGroup, ScoredShard, ShardRequest
from protocol.ports import ImagesHandle, Ports, RolloutHandle
from protocol.status import RecordedTrajectory, TrajectoryRecord
from rewards.images import ImageError, decode_image, encoded

log = logging.getLogger(__name__)
FILE = "trajectories_{:06d}.json"
FILES_KEPT = 20


class TrajectoryRecorder(Observer):
    """Records the first members of an iteration's first group, beside the loop.

    recorder = TrajectoryRecorder(config, ports, sink=keep)
    await train(config, observer=recorder, ...)
    """

    def __init__(self, config: RunConfig, ports: Ports, *, sink: Callable[[TrajectoryRecord], Awaitable[None]]) -> None:
        """
        Args:
            config: config of the run: `status.trajectories` members every `status.trajectories_every` iterations.
            ports: the actors that give the credit and the small images.
        """
        self._config = config
        self._sink = sink
        self._ports = ports
        self._images: dict[int, ImagesHandle] = {}
        self._versions: dict[int, list[int]] = {}
        self._task: asyncio.Task[None] | None = None
        self.staleness: int | None = None
        """Iterations between the newest update and the oldest adapter that rolled out its groups."""

    def begins(self, groups: GroupStream) -> None:  # noqa: ARG002
        """Forget the shards from before a restart: their iterations are repeated."""
        self._versions.clear()
        self._images.clear()

    def rolled_out(self, request: ShardRequest, images: ImagesHandle) -> None:
        """Remember the shard's adapter version, and the images of a shard that will be recorded."""
        self._versions.setdefault(request.iteration, []).append(request.adapter_version)
        iteration, group, first_member = request.iteration, request.group, request.first_member
        if self._config.records(iteration=iteration, group=group, first_member=first_member):
            self._images[request.iteration] = images

    def learned(self, iteration: int, batch: Sequence[ScoredGroup]) -> None:
        """Start recording the first group, unless another recording is still in progress."""
        versions = self._versions.pop(iteration, [])
        self.staleness = iteration - min(versions) if versions else None
        images = self._images.pop(iteration, None)
        if images is not None and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._record(iteration, batch[0].shards[0], images))

    async def finish(self, timeout_s: float = 10.0) -> None:
        """Wait for the recording in progress, for at most `timeout_s` seconds."""
        if self._task:
            await asyncio.wait({self._task}, timeout=timeout_s)
            self._task.cancel()

    async def _record(self, iteration: int, shard: ScoredShard, images: ImagesHandle) -> None:
        """Record one shard. If that fails, only this record is missing: the loop does not wait for it."""
        try:
            credit = await self._ports.learner.credit(0)
            if credit.adapter_version != iteration + 1:
                raise ContractError(f"the learner holds the credit of iteration {credit.adapter_version} by now")
            rollout = cast(RolloutHandle, shard.rollout)
            excerpt = await self._ports.rollouts.excerpt(rollout, images, members=self._config.status.trajectories)
            await self._sink(await asyncio.to_thread(record_of, iteration + 1, excerpt, credit))
        except Exception as error:  # noqa: BLE001  a failure here may cost only this record
            log.warning("the trajectories of iteration %d were not recorded: %s", iteration + 1, error)


def record_of(iteration: int, excerpt: Excerpt, credit: Credit) -> TrajectoryRecord:
    """Put an excerpt and its credit into one document.

    Of the members of a tree that share a step, the learner gives the first its credit. Here each of them has it.

    Args:
        iteration: iteration, counted from 1.
        excerpt: M trajectories with small images uint8 [M, P, h, w, 3]; P is S + 1, or 1 where no step has noise.
    """
    members, points, height, width, _ = excerpt.images.shape
    steps, columns = list(excerpt.steps), [*excerpt.steps, credit.rewards.shape[1] - 1][-points:]
    step_rewards, advantages = credit.step_rewards[:members, steps], credit.advantages[:members, steps]
    if len(excerpt.skipped) == len(steps):  # only finished images are scored: who has no step reward shares the step
        is_shared = np.isnan(step_rewards) & ~np.isnan(credit.rewards[:members, -1:])
        for member, column in np.argwhere(is_shared):
            first = np.flatnonzero(~np.isnan(step_rewards[:member, column]))[-1]
            step_rewards[member, column], advantages[member, column] = (
                step_rewards[first, column],
                advantages[first, column],
            )
    return TrajectoryRecord(
        iteration=iteration,
        prompt=excerpt.request.prompt.text,
        group_mean=rounded(mean_of(credit.rewards[:, -1])),
        steps=steps,
        skipped=list(excerpt.skipped),
        width=width,
        height=height,
        png=base64.b64encode(_png(excerpt.images)).decode(),
        trajectories=[
            RecordedTrajectory(
                member=member,
                rewards=list(map(rounded, credit.rewards[member, columns])),
                values=None if credit.values is None else list(map(rounded, credit.values[member, columns])),
                step_rewards=list(map(rounded, step_rewards[member])),
                advantages=list(map(rounded, advantages[member])),
            )
            for member in range(members)
        ],
    )


def write_record(folder: Path, record: TrajectoryRecord) -> None:
    """Write `trajectories_NNNNNN.json`, whole or not at all; keep only the newest `FILES_KEPT` files."""
    write_whole(folder / FILE.format(record.iteration), record.model_dump_json())
    for old in _files(folder)[:-FILES_KEPT]:
        old.unlink(missing_ok=True)


def read_records(folder: Path) -> list[TrajectoryRecord]:
    """Read all records of a `trajectories/` folder, oldest first; damaged files are left out."""
    found = map(_read, _files(folder))
    return [record for record in found if record]


def read_record(folder: Path, iteration: int) -> TrajectoryRecord | None:
    """Read the record of an iteration in a `trajectories/` folder; None if it is missing or damaged."""
    path = folder / FILE.format(iteration)
    return _read(path) if path.is_file() else None


def sheet(record: TrajectoryRecord) -> bytes:
    """Draw a record as a PNG: one row per trajectory, its rewards below the images, its step rewards between them.

    Raises:
        ContractError: the record is damaged.
    """
    from PIL import Image, ImageDraw

    images = record_images(record)
    cell, text, gap = max(record.width, 64), 26, 6
    tall = cell * record.height // record.width
    columns = images.width // record.width
    page = Image.new(
        "RGB", ((cell + gap) * columns + gap, (tall + text + gap) * len(record.trajectories) + gap), "white"
    )
    draw = ImageDraw.Draw(page)
    for row, trajectory in enumerate(record.trajectories):
        for column in range(columns):
            left, top = gap + column * (cell + gap), gap + row * (tall + text + gap)
            box = (column * record.width, row * record.height)
            tile = images.crop((*box, box[0] + record.width, box[1] + record.height))
            page.paste(tile.resize((cell, tall), Image.Resampling.NEAREST), (left, top))
            if column == columns - 1 or record.steps[column] not in record.skipped:
                draw.text((left, top + tall), number(trajectory.rewards[column]), fill="black")
            if column < len(trajectory.step_rewards) and columns > 1:
                draw.text(
                    (left + cell // 2, top + tall + 12), number(trajectory.step_rewards[column], "+.3f"), fill="#555555"
                )
    return encoded(page, "PNG")


def record_images(record: TrajectoryRecord) -> Any:
    """Decode the images of a record: one row per trajectory, one column per point.

    Raises:
        ContractError: they do not fit the record.
    """
    from PIL import Image

    try:
        images = Image.fromarray(decode_image(base64.b64decode(record.png, validate=True)))
    except (ValueError, ImageError) as error:
        raise ContractError(f"its images cannot be read: {error}") from None
    points, rows = len(record.steps) + 1, len(record.trajectories)
    fits = [(record.width * count, record.height * rows) for count in (points, 1)]
    lengths = {(len(one.rewards) * record.width, len(one.step_rewards)) for one in record.trajectories}
    if images.size not in fits or lengths != {(images.width, len(record.steps))}:
        raise ContractError(f"its images, {images.width}x{images.height}, or its numbers do not fit its steps")
    return images


def _files(folder: Path) -> list[Path]:
    """List the files of records, oldest first: `trajectories_999999` before `trajectories_1000000`."""
    return sorted(folder.glob("trajectories_*.json"), key=lambda path: (len(path.name), path.name))


def _read(path: Path) -> TrajectoryRecord | None:
    try:
        return TrajectoryRecord.read(path.read_bytes())
    except (OSError, ValueError):
        log.warning("%s cannot be read and is left out", path)
        return None


def _png(images: np.ndarray) -> bytes:
    """Encode uint8 [M, P, h, w, 3] as one PNG of M rows and P columns."""
    from PIL import Image

    members, points, height, width, _ = images.shape
    flat = images.transpose(0, 2, 1, 3, 4).reshape(members * height, points * width, 3)
    return encoded(Image.fromarray(flat), "PNG", optimize=True)
