"""The trajectories that a report shows: with the highest and the lowest final reward, and with the largest rise."""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from deploy.monitor.trajectories import record_images
from deploy.report.runs import SeedGroup
from protocol.errors import ContractError
from protocol.status import TrajectoryRecord
from rewards.images import encoded

LARGEST = 256
"""Longest side of an image in pixels; larger images are scaled down."""


@dataclass(frozen=True)
class Tile:
    """One point of a trajectory."""

    image: str
    """The clean-image estimate as a `data:` address."""
    name: str
    reward: float | None


@dataclass(frozen=True)
class ShownStep:
    """What one denoising step earned."""

    step: int
    step_reward: float | None
    advantage: float | None


@dataclass(frozen=True)
class ShownTrajectory:
    """One trajectory, ready for the template."""

    title: str
    run: str
    iteration: int
    prompt: str
    member: int
    items: Sequence[Tile | ShownStep]
    """Points and the steps between them, in order; steps stand before the finished image if only that was scored."""


@dataclass(frozen=True)
class _Candidate:
    run: str
    record: TrajectoryRecord
    row: int
    final: float
    rise: float
    """Rise of the reward from its lowest point to the finished image."""


def chosen_of(group: SeedGroup) -> list[ShownTrajectory]:
    """Choose up to three trajectories of a group; a trajectory is shown once, and damaged records are left out."""
    found = list(_candidates(group))
    wanted = (
        ("Best: the highest reward at the end", lambda each: each.final),
        ("Worst: the lowest reward at the end", lambda each: -each.final),
        ("Turned around: the largest rise from its lowest point to the end", lambda each: each.rise),
    )
    trajectories, shown = [], set()
    for title, worth in wanted:
        left = [each for each in found if id(each) not in shown and np.isfinite(worth(each))]
        for best in sorted(left, key=worth, reverse=True):
            shown.add(id(best))
            try:
                trajectories.append(_shown(title, best))
                break
            except ContractError:
                continue
    return trajectories


def data_url(image: np.ndarray) -> str:
    """Return an image uint8 [H, W, 3] as a `data:` address: a PNG, or a JPEG of `LARGEST` pixels if it is larger."""
    from PIL import Image

    shown = Image.fromarray(image)
    kind, options = ("PNG", {"optimize": True}) if max(shown.size) <= LARGEST else ("JPEG", {"quality": 88})
    shown.thumbnail((LARGEST, LARGEST))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(encoded(shown, kind, **options)).decode()}"


def _candidates(group: SeedGroup) -> Iterator[_Candidate]:
    for run in group.runs:
        for record in run.records:
            for row, trajectory in enumerate(record.trajectories):
                rewards = [np.nan if reward is None else reward for reward in trajectory.rewards]
                if rewards and np.isfinite(rewards[-1]):
                    earlier = [reward for reward in rewards[:-1] if np.isfinite(reward)]
                    rise = rewards[-1] - min(earlier) if earlier else np.nan
                    yield _Candidate(run.name, record, row, rewards[-1], rise)


def _shown(title: str, chosen: _Candidate) -> ShownTrajectory:
    record, row = chosen.record, chosen.row
    sheet, trajectory = np.asarray(record_images(record)), record.trajectories[row]
    points = sheet.shape[1] // record.width
    top, items = row * record.height, []
    earned = list(map(ShownStep, record.steps, trajectory.step_rewards, trajectory.advantages))
    if points == 1:
        items += earned
    for point in range(points):
        left, is_last = point * record.width, point == points - 1
        image = data_url(sheet[top : top + record.height, left : left + record.width])
        name = "finished" if is_last else _named(record, record.steps[point])
        items.append(Tile(image, name, trajectory.rewards[point]))
        if not is_last:
            items.append(earned[point])
    return ShownTrajectory(title, chosen.run, record.iteration, record.prompt, trajectory.member, items)


def _named(record: TrajectoryRecord, step: int) -> str:
    return f"before step {step}" + (", not scored" if step in record.skipped else "")
