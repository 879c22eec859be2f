"""Runs one part in this process: `python -m benchmarks.speed.slot.one kernels:attention FILE --device cpu --tiny`.

Each line of the file is a JSON object: first device and versions, then the figures as the part finds them.
"""

import json
import math
import sys
from argparse import ArgumentParser
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.speed.slot.part import Figures, Where
from flow.device import computing
from protocol.config.cluster import RoleConfig


def main() -> None:
    """Run the part."""
    parser = ArgumentParser()
    parser.add_argument("part")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    module, _, name = asked.part.partition(":")
    part = getattr(import_module(f"benchmarks.speed.slot.{module}"), name)
    on_gpu = asked.device == "cuda"
    with (
        computing(RoleConfig(gpus=float(on_gpu), threads=torch.get_num_threads())),
        asked.file.open("a", encoding="utf-8") as file,
    ):

        def write(figures: Figures) -> None:
            finite = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in figures.items()
            }
            file.write(json.dumps(finite) + "\n")
            file.flush()

        write({"device": torch.cuda.get_device_name() if on_gpu else "CPU", "torch": torch.__version__})
        for figures in part(Where(asked.device, asked.tiny)):
            write(figures)


if __name__ == "__main__":
    sys.exit(main())
