"""The scores of an evaluation by prompt and image: `gallery/iteration_NNNNNN.json`.

Every evaluation of a run makes its images from the same noise, so two evaluations can be compared prompt by prompt.
"""

from pathlib import Path

import numpy as np

from deploy.folder.names import GALLERY
from learner.loop.evaluate import Evaluation, tag_of
from learner.loop.hacking import DIGITS
from protocol.config.run import EvaluationConfig
from protocol.ground.files import by_iteration, iteration_name, write_whole
from protocol.status import Document

SCORE = "score"
"""The name of the readings that make the held-out score."""


class HeldoutScores(Document):
    """The scores of one evaluation of P prompts with N images each."""

    iteration: int
    component: str
    """The scorer or component behind `score`, see `evaluation.component`."""
    seed: int
    """Seed of the noise."""
    steps: int
    """Euler steps of the ODE."""
    height: int | None = None
    """Height of an image in pixels; null if the file does not give it."""
    width: int | None = None
    """Width of an image in pixels; null if the file does not give it."""
    prompts: list[str]
    """[P] texts of the prompts."""
    tags: list[str]
    """[P] the kind of each prompt."""
    scores: dict[str, list[list[float | None]]]
    """[P][N] readings by scorer and component, null where an image has no score; `score` makes the held-out score."""

    def table(self, name: str = SCORE) -> np.ndarray:
        """Return readings by name, [P, N], NaN where an image has no score; all NaN if there are none by this name."""
        scores = np.array(self.scores[SCORE], float)
        return np.array(self.scores[name], float) if name in self.scores else np.full(scores.shape, np.nan)


def rounded(value: float) -> float | None:
    """Round a number to `DIGITS` digits, as documents hold it; None if it is not finite."""
    return round(float(value), DIGITS) if np.isfinite(value) else None


def heldout_of(iteration: int, evaluation: Evaluation, settings: EvaluationConfig) -> HeldoutScores:
    shapes = {image.shape[:2] for _, image, _ in evaluation.gallery}
    height, width = shapes.pop() if len(shapes) == 1 else (None, None)
    return HeldoutScores(
        iteration=iteration,
        component=settings.component,
        seed=settings.seed,
        steps=settings.steps,
        height=height,
        width=width,
        prompts=[prompt.text for prompt in evaluation.prompts],
        tags=[tag_of(prompt) for prompt in evaluation.prompts],
        scores={
            name: [[rounded(value) for value in row] for row in table] for name, table in evaluation.by_image.items()
        },
    )


def write_heldout(gallery: Path, iteration: int, evaluation: Evaluation, settings: EvaluationConfig) -> None:
    """Write the scores of an evaluation beside its images."""
    document = heldout_of(iteration, evaluation, settings)
    write_whole(gallery / iteration_name(iteration, ".json"), document.model_dump_json())


def read_heldout(run: Path) -> list[HeldoutScores]:
    """Read the scores of all evaluations of a run folder, oldest first; files that cannot be read are left out."""
    evaluations = []
    for path in by_iteration(run / GALLERY, ".json").values():
        try:
            evaluation = HeldoutScores.read(path.read_bytes())
            is_whole = all(
                np.array(table, float).shape[:1] == (len(evaluation.prompts),) for table in evaluation.scores.values()
            )
        except (OSError, ValueError):
            continue
        if is_whole and SCORE in evaluation.scores and len(evaluation.tags) == len(evaluation.prompts):
            evaluations.append(evaluation)
    return evaluations
