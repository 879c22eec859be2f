"""Run folders as training leaves them, with numbers that a test chooses; nothing is trained."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deploy.folder.heldout import write_heldout
from deploy.monitor.trajectories import write_record
from learner.loop.evaluate import Evaluation
from protocol.config.run import RunConfig
from protocol.messages import Prompt
from tests.support.runs.statuses import a_record

PROMPTS = tuple(
    Prompt(index=index, text=f"<b>prompt</b> {index} & $x", metadata={"tag": "colors" if index < 4 else "counting"})
    for index in range(6)
)


def an_evaluation(scores: Sequence[Sequence[float]]) -> Evaluation:
    """Six prompts of two kinds with these scores, [6, N]; every image is as bright as its first score."""
    table = np.array(scores, float)
    by_tag = {"colors": float(np.nanmean(table[:4])), "counting": float(np.nanmean(table[4:]))}
    images = [np.full((8, 8, 3), int(100 * np.nan_to_num(row[0])), np.uint8) for row in table]
    return Evaluation(
        score=float(np.mean(list(by_tag.values()))),
        by_tag=by_tag,
        missing=int(np.isnan(table).sum()),
        images=table.size,
        seconds=1.5,
        gallery=tuple(
            (prompt, image, float(np.nanmean(row))) for prompt, image, row in zip(PROMPTS, images, table, strict=True)
        ),
        prompts=PROMPTS,
        by_image={"score": table},
    )


def an_ended_run(folder: Path, config: RunConfig, *, iterations: int = 5, lift: float = 0.1, **metrics: Any) -> Path:
    """A run of this many iterations whose held-out scores rise by `lift`; `metrics` join every iteration's line."""
    for name in ("gallery", "trajectories", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    start = np.linspace(0.2, 0.7, 12).reshape(6, 2)
    first, last = an_evaluation(start), an_evaluation(start + lift)
    lines: list[dict[str, Any]] = [first.line(0)]
    for iteration in range(1, iterations + 1):
        lines.append(
            {
                "iteration": iteration,
                "reward/mean": 0.5 + lift * iteration / iterations,
                "train/approx_kl": 1e-5 * iteration,
                "train/ratio_mean": 1.0 + 1e-6 * iteration,
                "step_reward/step_0_abs_mean": 0.01 * iteration,
                "step_reward/step_1_abs_mean": 0.02,
                "seconds/rollout_and_reward": 3.0,
                "seconds/update": 1.0,
                "seconds/iteration": 4.0,
                "reward/missing": 0.0,
                **metrics,
            }
        )
    lines.append(last.line(iterations))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for iteration, evaluation in ((0, first), (iterations, last)):
        prompts, images, readings = zip(*evaluation.gallery, strict=True)
        arrays = {"prompts": np.array([prompt.text for prompt in prompts]), "images": np.stack(images)}
        np.savez(folder / "gallery" / f"iteration_{iteration:06d}.npz", readings=np.array(readings), **arrays)
        write_heldout(folder / "gallery", iteration, evaluation, config.evaluation)
    write_record(folder / "trajectories", a_record(iterations))
    return folder
