"""Recording a few trajectories of a run: their clean-image estimates, what each scored and what each step earned.

The recorder stands between the loop and its ports and hands everything on unchanged. Every
`status.trajectories_every` iterations it looks at the first shard of the first group, in a task beside the loop, so
results do not change. At most one recording is in progress; the next one is left out while it lasts.
"""

import asyncio
import base64
import io
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from deploy.folder.files import write_whole
from protocol.config.run import RunConfig
from protocol.errors import FlowcreditError
from protocol.messages import Credit, Excerpt, GenerateRequest, Receipt, ScoredGroup, Scores, ShardRequest
from protocol.ports import Handle, Metrics, Ports, RolloutSource
from protocol.status import RecordedTrajectory, TrajectoryRecord

log = logging.getLogger(__name__)
FILE = "trajectories_{:06d}.json"
FILES_KEPT = 20


class TrajectoryRecorder:
    """Serves the rollout and learner ports of a run by handing on to `ports`.

    recorder = TrajectoryRecorder(config, ports, sink=reporter.recorded_trajectories)
    await train(config, ports=recorder.ports, ...)
    """

    def __init__(self, config: RunConfig, ports: Ports, *, sink: Callable[[TrajectoryRecord], None]) -> None:
        self._settings = config.status
        self._sink = sink
        self._inner = ports
        self._learner: Any = ports.learner
        self._images: dict[int, Handle] = {}
        self._versions: dict[int, list[int]] = {}
        self._task: asyncio.Task[None] | None = None
        self.staleness: int | None = None
        self.ports = replace(ports, rollouts=_Rollouts(ports.rollouts, self), learner=_Learner(self))

    def forget(self) -> None:
        """What was drawn is not learned from: the learner was lost, iterations are repeated."""
        self._versions.clear()
        self._images.clear()

    def saw(self, request: ShardRequest, images: Handle) -> None:
        """A shard was drawn."""
        self._versions.setdefault(request.iteration, []).append(request.version)
        if self._is_recorded(request.iteration) and request.group == 0 and request.first_member == 0:
            self._images[request.iteration] = images

    async def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Hand on, and record what the first group earned when it is this iteration's turn."""
        metrics = await self._learner.update(groups)
        iteration = min(self._versions, default=0)
        versions = self._versions.pop(iteration, [])
        self.staleness = iteration - min(versions) if versions else None
        images = self._images.pop(iteration, None)
        if images is not None and (self._task is None or self._task.done()):
            credit = await self._learner.credit(0)
            self._task = asyncio.create_task(self._record(iteration, groups[0], images, credit))
        return metrics

    async def finish(self, timeout_s: float = 10.0) -> None:
        """Let the recording in progress end."""
        if self._task:
            await asyncio.wait({self._task}, timeout=timeout_s)
            self._task.cancel()

    def _is_recorded(self, iteration: int) -> bool:
        """`iteration` counts from 0; the first one is recorded, and every `trajectories_every`-th."""
        every = self._settings.trajectories_every
        return self._settings.trajectories > 0 and (iteration == 0 or (iteration + 1) % every == 0)

    async def _record(self, iteration: int, group: ScoredGroup, images: Handle, credit: Credit) -> None:
        shard = group.shards[0]
        try:
            excerpt = await self._inner.rollouts.excerpt(shard.rollout, images, members=self._settings.trajectories)
            self._sink(await asyncio.to_thread(record_of, iteration + 1, excerpt, shard.scores, credit))
        except (FlowcreditError, OSError) as error:
            log.warning("the trajectories of iteration %d were not recorded: %s", iteration + 1, error)


class _Rollouts:
    """The rollout port."""

    def __init__(self, inner: RolloutSource, recorder: TrajectoryRecorder) -> None:
        self._inner = inner
        self._recorder = recorder

    async def rollout(self, request: ShardRequest) -> tuple[Receipt, Handle, Handle]:
        answer = await self._inner.rollout(request)
        self._recorder.saw(request, answer[2])
        return answer

    async def generate(self, request: GenerateRequest) -> tuple[Receipt, Handle]:
        return await self._inner.generate(request)

    async def fetch(self, images: Handle) -> np.ndarray:
        return await self._inner.fetch(images)

    async def excerpt(self, rollout: Handle, images: Handle, *, members: int) -> Excerpt:
        return await self._inner.excerpt(rollout, images, members=members)


class _Learner:
    """The learner port: only `update` is looked at."""

    def __init__(self, recorder: TrajectoryRecorder) -> None:
        self.update = recorder.update
        self.adapter = recorder._inner.learner.adapter
        self.credit = recorder._inner.learner.credit
        self.state = recorder._inner.learner.state
        self.restore = recorder._inner.learner.restore


def record_of(iteration: int, excerpt: Excerpt, scores: Scores, credit: Credit) -> TrajectoryRecord:
    """The excerpt with its rewards and credit; `iteration` counts from 1."""
    members, _, height, width, _ = excerpt.images.shape
    rewards = scores.values[excerpt.image_index]
    return TrajectoryRecord(
        iteration=iteration,
        prompt=excerpt.request.prompt.text,
        steps=list(excerpt.steps),
        width=width,
        height=height,
        png=base64.b64encode(_png(excerpt.images)).decode(),
        trajectories=[
            RecordedTrajectory(
                member=member,
                rewards=_numbers(rewards[member]),
                gains=_numbers(credit.gains[member, list(excerpt.steps)]),
                advantages=_numbers(credit.advantages[member, list(excerpt.steps)]),
            )
            for member in range(members)
        ],
    )


def write_record(folder: Path, record: TrajectoryRecord) -> None:
    """`trajectories_NNNNNN.json`, whole or not at all; only the newest `FILES_KEPT` stay."""
    write_whole(folder / FILE.format(record.iteration), record.model_dump_json())
    for old in sorted(folder.glob("trajectories_*.json"))[:-FILES_KEPT]:
        old.unlink(missing_ok=True)


def read_records(folder: Path) -> list[TrajectoryRecord]:
    """All recorded trajectories of a `trajectories/` folder, oldest first; damaged files are left out."""
    trajectories = []
    for path in sorted(folder.glob("trajectories_*.json")):
        try:
            trajectories.append(TrajectoryRecord.model_validate(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError):
            log.warning("%s cannot be read and is left out", path)
    return trajectories


def sheet(record: TrajectoryRecord) -> bytes:
    """A PNG for people: each trajectory a row, its reward under each image and the gain of each step between them."""
    from PIL import Image, ImageDraw

    images = Image.open(io.BytesIO(base64.b64decode(record.png)))
    cell, text, gap = max(record.width, 64), 26, 6
    tall = cell * record.height // record.width
    columns = images.width // record.width
    page = Image.new(
        "RGB", ((cell + gap) * columns + gap, (tall + text + gap) * len(record.trajectories) + gap), "white"
    )
    draw = ImageDraw.Draw(page)
    for row, strip in enumerate(record.trajectories):
        for column in range(columns):
            left, top = gap + column * (cell + gap), gap + row * (tall + text + gap)
            box = (column * record.width, row * record.height)
            tile = images.crop((*box, box[0] + record.width, box[1] + record.height))
            page.paste(tile.resize((cell, tall), Image.Resampling.NEAREST), (left, top))
            draw.text((left, top + tall), _shown(strip.rewards[column], ".3f"), fill="black")
            if column < len(strip.gains) and columns > 1:
                draw.text((left + cell // 2, top + tall + 12), _shown(strip.gains[column], "+.3f"), fill="#555555")
    out = io.BytesIO()
    page.save(out, "PNG")
    return out.getvalue()


def _png(images: np.ndarray) -> bytes:
    """uint8 [M, P, h, w, 3] as one image of M rows and P columns."""
    from PIL import Image

    members, points, height, width, _ = images.shape
    flat = images.transpose(0, 2, 1, 3, 4).reshape(members * height, points * width, 3)
    out = io.BytesIO()
    Image.fromarray(flat).save(out, "PNG", optimize=True)
    return out.getvalue()


def _numbers(values: np.ndarray) -> list[float | None]:
    return [round(float(value), 6) if np.isfinite(value) else None for value in values]


def _shown(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)
