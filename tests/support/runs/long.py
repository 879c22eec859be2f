"""Ended runs of many iterations and steps with plausible numbers, several methods and seeds; nothing is trained."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deploy.folder.heldout import write_heldout
from deploy.folder.read import Origin, StatusFile
from learner.loop.evaluate import Evaluation
from protocol.config.run import RunConfig
from protocol.messages import Prompt
from protocol.status import ActorStatus, Event, RunStatus

KINDS = ("single_object", "colors", "counting", "position")
COLOURS = ((200, 60, 50), (60, 90, 200), (60, 160, 80), (220, 180, 40))


def a_long_run(
    folder: Path, config: RunConfig, *, iterations: int = 60, steps: int = 10, evaluations: int = 5, pace: float = 1.0
) -> Path:
    """Write a run folder as training leaves it, without checkpoints.

    Args:
        folder: is made.
        config: its seed moves the numbers.
        iterations: lines of metrics, without those of evaluations.
        steps: denoising steps with gains.
        evaluations: of 24 prompts of four kinds with two images each, at the start and then evenly.
        pace: how fast it learns.

    Returns:
        `folder`.
    """
    for name in ("gallery", "trajectories", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    (folder / "origin.json").write_text(Origin(versions={}, sources={"seed": "override"}).model_dump_json())
    rng = np.random.default_rng(config.seed)
    at = sorted({round(index * iterations / max(1, evaluations - 1)) for index in range(evaluations)})
    lines: list[dict[str, Any]] = []
    scores: list[float] = []
    for iteration in range(iterations + 1):
        learnt = 0.35 * (1 - math.exp(-3 * pace * iteration / iterations))
        if iteration:
            lines.append(_line(iteration, learnt, steps, rng))
        if iteration in at:
            evaluation = _evaluation(learnt, rng)
            lines.append(evaluation.line(iteration))
            scores.append(evaluation.score)
            write_heldout(folder / "gallery", iteration, evaluation, config.evaluation)
            _write_images(folder / "gallery", iteration, evaluation)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    newest = lines[-1] if "reward/mean" in lines[-1] else lines[-2]
    status = RunStatus.model_validate(
        {
            "run": folder.name,
            "session": f"s{config.seed}",
            "phase": "finished",
            "iteration": iterations,
            "iterations": iterations,
            "started": 1.7e9,
            "updated": 1.7e9 + 60 * config.seed,
            "lines": len(lines),
            "rewards": {
                "now": newest["reward/mean"],
                "heldout": scores[-1],
                "heldout_first": scores[0],
                "heldout_iteration": at[-1],
            },
            "metrics": newest,
            "actors": [
                ActorStatus(
                    name=f"learner-{index}",
                    kind="learner",
                    state="ended",
                    adapter_digest="0123456789ab",
                    busy_share=0.5 + 0.1 * index,
                    fetched_bytes=10**7,
                )
                for index in range(2)
            ],
        }
    )
    (folder / "status.json").write_text(StatusFile(status=status, events=list(_events(iterations))).model_dump_json())
    return folder


def _line(iteration: int, learnt: float, steps: int, rng: np.random.Generator) -> dict[str, Any]:
    noise = rng.normal(size=8)
    gains = {
        name: value
        for step in range(steps)
        for name, value in {
            f"step_reward/step_{step}_abs_mean": abs(
                0.02 + 0.1 * math.sin(3 * (step + 1) / steps) + 0.01 * rng.normal()
            ),
            f"step_reward/step_{step}_zero_share": 0.01,
            f"advantage/step_{step}_mean": 0.0,
            f"advantage/step_{step}_std": 0.9 + 0.01 * step,
            f"credit/step_{step}_slope": step / steps,
        }.items()
    }
    return {
        "iteration": iteration,
        "reward/mean": 0.45 + learnt + 0.04 * noise[0],
        "reward/geneval": 0.45 + learnt + 0.04 * noise[0] + 2e-6,  # the reward itself, up to rounding
        "reward/clip": 0.3 + learnt / 2 + 0.02 * noise[1],
        "reward/group_std": 0.2 - learnt / 4 + 0.01 * noise[2],
        "reward/missing": 0.0,
        "group/zero_variance": abs(0.05 + 0.02 * noise[3]),
        "train/loss": -1e-5 * (1 + noise[4]),
        "train/grad_norm": abs(0.1 + 0.02 * noise[5]),
        "train/ratio_mean": 1 + 1e-4 * noise[6],
        "train/first_ratio_deviation": 0.0,
        "train/clip_fraction": abs(0.1 + 0.02 * noise[7]),
        "train/approx_kl": 1e-4 * (1 + learnt),
        "train/reference_kl": 1e-3 * learnt,
        "seconds/rollout_and_reward": 3.0 + 0.2 * noise[1],
        "seconds/update": 1.0,
        "seconds/publish": 0.1,
        "seconds/iteration": 4.1 + 0.2 * noise[1],
        "work/sampling_seconds": 2.0,
        "work/completing_seconds": 2.5,
        "work/decoding_seconds": 0.3,
        "work/scoring_seconds": 1.0,
        "work/training_seconds": 0.9,
        "work/main_evaluations": 960,
        "work/completion_evaluations": 2400,
        "work/gradient_evaluations": 960,
        "update/workers": 2,
        "update/busy_share": 0.6,
        "update/busy_share_min": 0.5,
        "update/reduction_seconds": 0.05,
        "usage/rollout-0/memory_gib": 1.5,
        **gains,
    }


def _evaluation(learnt: float, rng: np.random.Generator) -> Evaluation:
    prompts = tuple(
        Prompt(
            index=index,
            text=f"a {('red', 'blue', 'green', 'yellow')[index % 4]} shape number {index}",
            metadata={"tag": KINDS[index // 6]},
        )
        for index in range(24)
    )
    table = np.clip(rng.normal(0.4 + learnt, 0.2, (24, 2)), 0, 1)
    by_tag = {kind: float(table[6 * at : 6 * at + 6].mean()) for at, kind in enumerate(KINDS)}
    return Evaluation(
        score=float(np.mean(list(by_tag.values()))),
        by_tag=by_tag,
        missing=0,
        images=table.size,
        readings={"clip": float(table.mean() / 2)},
        seconds=5.0,
        gallery=tuple(
            (prompts[index], _image(index, table[index, 0]), float(table[index].mean())) for index in range(0, 24, 2)
        ),
        prompts=prompts,
        by_image={"score": table, "clip": table / 2},
    )


def _image(index: int, score: float) -> np.ndarray:
    """A disc, larger for a better score."""
    y, x = np.mgrid[:32, :32]
    image = np.full((32, 32, 3), 235, np.uint8)
    image[(x - 16) ** 2 + (y - 16) ** 2 < (4 + 10 * score) ** 2] = COLOURS[index % 4]
    return image


def _write_images(gallery: Path, iteration: int, evaluation: Evaluation) -> None:
    """The arrays of `write_gallery` without its drawing, which takes seconds."""
    prompts, images, readings = zip(*evaluation.gallery, strict=True)
    np.savez(
        gallery / f"iteration_{iteration:06d}.npz",
        prompts=np.array([prompt.text for prompt in prompts]),
        images=np.stack(images),
        readings=np.array(readings, np.float32),
    )


def _events(iterations: int) -> Iterator[Event]:
    for number in range(1, 41):
        kind = "warning" if number % 10 == 0 else "error" if number == 25 else "info"
        message = {
            "info": f"checkpoint of iteration {number * iterations // 40}",
            "warning": "ScoresComplete: 3 images have no score",
            "error": "a reward actor failed",
        }[kind]
        yield Event(number=number, time=1.7e9 + 3_000 * number, kind=kind, message=message)
