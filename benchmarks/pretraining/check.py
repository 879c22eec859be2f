"""Measure the toy world's detector and CLIP, for the figures in its README: `python -m benchmarks.pretraining.check`.

The detector reads rendered scenes, and the same scenes after the shipped autoencoder. The CLIP compares true and wrong
captions.
"""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from diffusers import AutoencoderTiny
from jaxtyping import UInt8
from transformers import CLIPModel, CLIPProcessor

from benchmarks.output import show
from benchmarks.pretraining.autoencoder import reconstruct
from benchmarks.pretraining.clip import pair_accuracy
from benchmarks.pretraining.dataset import Examples, draw_examples
from benchmarks.pretraining.export import TOYWORLD
from protocol.messages import Detection
from toyworld.world.detector import ShapeDetector
from toyworld.world.scenes import Scene
from toyworld.world.vocabulary import TAGS

CENTRE_TOLERANCE = 1.5
"""Largest error of a detected box's centre, in pixels."""


def is_read_right(scene: Scene, detections: list[Detection]) -> bool:
    """Tell whether the detections match the scene's shapes one to one: class, colour, and centre to
    CENTRE_TOLERANCE."""
    left = list(detections)
    for shape in scene.shapes:
        same = [d for d in left if (d.label, d.color) == (shape.label, shape.color) and _is_near(d.box, shape.box)]
        if not same:
            return False
        left.remove(same[0])
    return not left


def detector_accuracy(examples: Examples, images: UInt8[np.ndarray, "B H W 3"]) -> dict[str, float]:
    """Return the share of scenes that the detector reads correctly, by task kind."""
    right: dict[str, list[bool]] = {tag: [] for tag in TAGS}
    detections = ShapeDetector().detect(images)
    for line, scene, found in zip(examples.true_lines, examples.scenes, detections, strict=True):
        right[line["tag"]].append(is_read_right(scene, found))
    return {tag: sum(reads) / len(reads) for tag, reads in right.items()}


def _is_near(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    """Tell whether the centres of two boxes are within CENTRE_TOLERANCE of each other."""
    return float(np.hypot(a[0] + a[2] - b[0] - b[2], a[1] + a[3] - b[1] - b[3])) / 2 <= CENTRE_TOLERANCE


def main(
    scenes: Annotated[int, typer.Option(help="Scenes to draw.", min=60)] = 3000,
    seed: Annotated[int, typer.Option(help="Seed of the scenes; the pretraining set has 0.")] = 99,
    model_folder: Annotated[Path, typer.Option(help="Folder of the pipeline whose autoencoder is used.")] = (
        TOYWORLD / "model"
    ),
    clip_folder: Annotated[Path, typer.Option(help="Folder of the CLIP.")] = TOYWORLD / "clip",
) -> None:
    """Measure the detector and the CLIP on newly drawn scenes, and print one table."""
    torch.set_num_threads(1)
    examples = draw_examples(scenes, seed=seed)
    began = time.perf_counter()
    true = detector_accuracy(examples, examples.images)
    milliseconds = 1000 * (time.perf_counter() - began) / scenes
    vae = AutoencoderTiny.from_pretrained(model_folder / "vae").float()
    autoencoded = detector_accuracy(examples, reconstruct(vae, examples.images))
    model = CLIPModel.from_pretrained(clip_folder, dtype=torch.float32).eval()
    pairs = pair_accuracy(model, CLIPProcessor.from_pretrained(clip_folder), examples)
    columns = {"true renders": true, "autoencoded": autoencoded, "CLIP pairs": pairs}
    for column in columns.values():
        column["mean"] = float(np.mean(list(column.values())))
    show([{"task kind": tag, **{name: column[tag] for name, column in columns.items()}} for tag in (*TAGS, "mean")])
    typer.echo(f"{scenes} scenes; the detector took {milliseconds:.2f} ms per image")


if __name__ == "__main__":
    typer.run(main)
