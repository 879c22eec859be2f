"""Recording a few trajectories of a run: their clean-picture estimates, what each scored and what each step earned.

The recorder stands between the loop and its ports and hands everything on unchanged; it looks at the first shard of an
iteration's first group every `status.strips_every` iterations, in a task beside the loop, so results do not change and
the loop does not wait. At most one recording is in progress; the next one is left out while it lasts.
"""

import asyncio
import base64
import io
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from protocol.config.run import RunConfig
from protocol.errors import FlowcreditError
from protocol.messages import Credit, DrawRequest, Excerpt, Receipt, ScoredGroup, Scores, ShardRequest
from protocol.ports import Handle, Metrics, Parts, RolloutSource
from protocol.status import Sample, Strip

log = logging.getLogger(__name__)
FILE = "strips_{:06d}.json"
FILES_KEPT = 20


class StripRecorder:
    """Serves the rollout and learner ports of a run by handing on to `parts`.

    recorder = StripRecorder(config, parts, sink=reporter.sampled)
    await train(config, parts=recorder.parts, ...)
    """

    def __init__(self, config: RunConfig, parts: Parts, *, sink: Callable[[Sample], None]) -> None:
        self._settings = config.status
        self._sink = sink
        self._inner = parts
        self._learner: Any = parts.learner
        self._pictures: dict[int, Handle] = {}
        self._versions: dict[int, list[int]] = {}
        self._task: asyncio.Task[None] | None = None
        self.staleness: int | None = None
        self.parts = replace(parts, rollouts=_Rollouts(parts.rollouts, self), learner=_Learner(self))

    def forget(self) -> None:
        """What was drawn is not learned from: the learner was lost, iterations are repeated."""
        self._versions.clear()
        self._pictures.clear()

    def saw(self, request: ShardRequest, pictures: Handle) -> None:
        """A shard was drawn."""
        self._versions.setdefault(request.iteration, []).append(request.version)
        if self._is_recorded(request.iteration) and request.group == 0 and request.first_member == 0:
            self._pictures[request.iteration] = pictures

    async def update(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Hand on, and record what the first group earned when it is this iteration's turn."""
        metrics = await self._learner.update(groups)
        iteration = min(self._versions, default=0)
        versions = self._versions.pop(iteration, [])
        self.staleness = iteration - min(versions) if versions else None
        pictures = self._pictures.pop(iteration, None)
        if pictures is not None and (self._task is None or self._task.done()):
            credit = await self._learner.credit(0)
            self._task = asyncio.create_task(self._record(iteration, groups[0], pictures, credit))
        return metrics

    async def finish(self, timeout_s: float = 10.0) -> None:
        """Let the recording in progress end."""
        if self._task:
            await asyncio.wait({self._task}, timeout=timeout_s)
            self._task.cancel()

    def _is_recorded(self, iteration: int) -> bool:
        """`iteration` counts from 0; the first one is recorded, and every `strips_every`-th."""
        every = self._settings.strips_every
        return self._settings.strips > 0 and (iteration == 0 or (iteration + 1) % every == 0)

    async def _record(self, iteration: int, group: ScoredGroup, pictures: Handle, credit: Credit) -> None:
        shard = group.shards[0]
        try:
            excerpt = await self._inner.rollouts.excerpt(shard.rollout, pictures, members=self._settings.strips)
            self._sink(await asyncio.to_thread(sample_of, iteration + 1, excerpt, shard.scores, credit))
        except (FlowcreditError, OSError) as error:
            log.warning("the trajectories of iteration %d were not recorded: %s", iteration + 1, error)


class _Rollouts:
    """The rollout port."""

    def __init__(self, inner: RolloutSource, recorder: StripRecorder) -> None:
        self._inner = inner
        self._recorder = recorder

    async def sample(self, request: ShardRequest) -> tuple[Receipt, Handle, Handle]:
        answer = await self._inner.sample(request)
        self._recorder.saw(request, answer[2])
        return answer

    async def draw(self, request: DrawRequest) -> tuple[Receipt, Handle]:
        return await self._inner.draw(request)

    async def fetch(self, pictures: Handle) -> np.ndarray:
        return await self._inner.fetch(pictures)

    async def excerpt(self, rollout: Handle, pictures: Handle, *, members: int) -> Excerpt:
        return await self._inner.excerpt(rollout, pictures, members=members)


class _Learner:
    """The learner port: only `update` is looked at."""

    def __init__(self, recorder: StripRecorder) -> None:
        self.update = recorder.update
        self.weights = recorder._inner.learner.weights
        self.credit = recorder._inner.learner.credit
        self.state = recorder._inner.learner.state
        self.restore = recorder._inner.learner.restore


def sample_of(iteration: int, excerpt: Excerpt, scores: Scores, credit: Credit) -> Sample:
    """The excerpt with its rewards and credit; `iteration` counts from 1."""
    members, _, height, width, _ = excerpt.pictures.shape
    rewards = scores.values[excerpt.image_index]
    return Sample(
        iteration=iteration,
        prompt=excerpt.request.prompt.text,
        steps=list(excerpt.steps),
        width=width,
        height=height,
        png=base64.b64encode(_png(excerpt.pictures)).decode(),
        strips=[
            Strip(
                member=member,
                rewards=_numbers(rewards[member]),
                gains=_numbers(credit.gains[member, list(excerpt.steps)]),
                advantages=_numbers(credit.advantages[member, list(excerpt.steps)]),
            )
            for member in range(members)
        ],
    )


def write_sample(folder: Path, sample: Sample) -> None:
    """`strips_NNNNNN.json`, whole or not at all; only the newest `FILES_KEPT` stay."""
    partial = folder / ".strips.partial"
    partial.write_text(sample.model_dump_json(), encoding="utf-8")
    os.replace(partial, folder / FILE.format(sample.iteration))
    for old in sorted(folder.glob("strips_*.json"))[:-FILES_KEPT]:
        old.unlink(missing_ok=True)


def read_samples(folder: Path) -> list[Sample]:
    """All recorded trajectories of a `samples/` folder, oldest first; damaged files are left out."""
    samples = []
    for path in sorted(folder.glob("strips_*.json")):
        try:
            samples.append(Sample.model_validate(json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError):
            log.warning("%s cannot be read and is left out", path)
    return samples


def sheet(sample: Sample) -> bytes:
    """A PNG for people: each trajectory a row, its reward under each picture and the gain of each step between them."""
    from PIL import Image, ImageDraw

    pictures = Image.open(io.BytesIO(base64.b64decode(sample.png)))
    cell, text, gap = max(sample.width, 64), 26, 6
    tall = cell * sample.height // sample.width
    columns = pictures.width // sample.width
    page = Image.new("RGB", ((cell + gap) * columns + gap, (tall + text + gap) * len(sample.strips) + gap), "white")
    draw = ImageDraw.Draw(page)
    for row, strip in enumerate(sample.strips):
        for column in range(columns):
            left, top = gap + column * (cell + gap), gap + row * (tall + text + gap)
            box = (column * sample.width, row * sample.height)
            tile = pictures.crop((*box, box[0] + sample.width, box[1] + sample.height))
            page.paste(tile.resize((cell, tall), Image.Resampling.NEAREST), (left, top))
            draw.text((left, top + tall), _shown(strip.rewards[column], ".3f"), fill="black")
            if column < len(strip.gains) and columns > 1:
                draw.text((left + cell // 2, top + tall + 12), _shown(strip.gains[column], "+.3f"), fill="#555555")
    out = io.BytesIO()
    page.save(out, "PNG")
    return out.getvalue()


def _png(pictures: np.ndarray) -> bytes:
    """uint8 [M, P, h, w, 3] as one picture of M rows and P columns."""
    from PIL import Image

    members, points, height, width, _ = pictures.shape
    flat = pictures.transpose(0, 2, 1, 3, 4).reshape(members * height, points * width, 3)
    out = io.BytesIO()
    Image.fromarray(flat).save(out, "PNG", optimize=True)
    return out.getvalue()


def _numbers(values: np.ndarray) -> list[float | None]:
    return [round(float(value), 6) if np.isfinite(value) else None for value in values]


def _shown(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)
