"""What a few minutes on a GPU are for: every measurement that decides something, the most decisive first.

    python3 -m benchmarks.speed.slot slot.jsonl                    # 420 s at most, without Ray
    python3 -m benchmarks.speed.slot slot.jsonl --ray              # 400 s at most: tests and a run on Ray
    python3 -m benchmarks.speed.slot slot.jsonl compiled flux      # only these parts
    python3 -m benchmarks.speed.slot tiny.jsonl --device cpu --tiny --slower 10    # a rehearsal without a GPU

Each part runs in a process of its own with a time limit. After each the results file gets a line of JSON: its name,
seconds, limit, device, torch's version, its figures and, if it did not end well, why. A part that is stopped keeps the
figures that it had found. `slot.log` beside the results holds what the parts print. A part for which too little of the
whole time is left is left out; a shorter one after it may still run.

It runs without make, with any interpreter that has torch (2.11 to 2.13) and the packages around it
(`tests/support/worlds/bare.py` lists them), and what `benchmarks/speed/slot/wheels.txt` lists; so does
`python3 -m pytest -m gpu`, with pytest-xdist and pytest-timeout. To a machine without a package index that travels as
files, 32 MiB beside the 23 MiB of this tree; for `--ray` what `wheels_ray.txt` lists, 28 MiB, with Ray's wheel made
small:

    download="python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --constraint constraints.txt \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64"
    $download --dest wheels --requirement benchmarks/speed/slot/wheels.txt
    $download --dest wheels/ray --requirement benchmarks/speed/slot/wheels_ray.txt
    python3 -m benchmarks.speed.slot.slim_wheel wheels/ray/ray-*.whl

    # there, with wheels/*.whl, and before --ray with wheels/ray/*.whl
    python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site wheels/*.whl
    PYTHONPATH=/tmp/site python3 -m benchmarks.speed.slot slot.jsonl
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Part:
    """One measurement."""

    function: str
    """Module and function of `benchmarks.speed.slot`."""
    limit: float
    """Seconds after which its process is stopped."""
    decides: str
    """The question that it answers."""

    @property
    def name(self) -> str:
        """Its function's name."""
        return self.function.partition(":")[2]


PARTS = (
    Part("kernels:ceilings", 60, "the most that anything else can reach"),
    Part("kernels:attention", 70, "which attention is fast and gives the same bits"),
    Part("kernels:norms", 40, "whether RMSNorm of short rows is worth a kernel of its own"),
    Part("kernels:projections", 30, "whether queries, keys and values should share products"),
    Part("medium:benchmark", 90, "images and pairs a second, share of the peak, memory"),
    Part("medium:tuned", 60, "the same with all kernels that are off by default"),
    Part("medium:compiled", 150, "the same with compiled blocks, and whether their replays are exact"),
    Part("medium:forwards", 60, "what a rollout's forward and the VAE spend their time on"),
    Part("medium:gradients", 40, "which loss scale float16 needs"),
    Part("scorers:scorers", 60, "how many reward actors a run needs"),
    Part("large:flux", 120, "memory beside its estimate, offload, one base for two processes"),
    Part("large:qwen", 80, "masked attention, what waits for the GPU, and blocks on two GPUs"),
    Part(
        "whole:exactness", 90, "exact replay of every family in half precision, and its latents beside the pipeline's"
    ),
)
"""The most decisive first."""
RAY = (
    Part("whole:on_ray", 270, "one end for every layout, and after a kill"),
    Part("whole:run", 150, "the share of the peak that a whole run reaches"),
)
SECONDS, RAY_SECONDS = 420.0, 400.0
LEAST = 1 / 3
"""Share of a part's limit that must be left for it to begin."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the parts."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file that gets the results, a line of JSON for each part")
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(part.name for part in (*PARTS, *RAY))}; default all")
    parser.add_argument("--ray", action="store_true", help="the parts that need Ray, instead of the others")
    parser.add_argument("--seconds", type=float, help=f"for all parts; default {SECONDS:g}, with --ray {RAY_SECONDS:g}")
    parser.add_argument("--slower", type=float, default=1.0, help="factor of all limits, for a busy CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models and sizes, to rehearse on a CPU")
    asked = parser.parse_intermixed_args(words)
    if unknown := set(asked.parts) - {part.name for part in (*PARTS, *RAY)}:
        parser.error(f"a part must be one of {[part.name for part in (*PARTS, *RAY)]}, got {sorted(unknown)[0]!r}")
    chosen = [part for part in (*PARTS, *RAY) if part.name in asked.parts] or (RAY if asked.ray else PARTS)
    options = ["--device", asked.device, *(["--tiny"] if asked.tiny else [])]
    ends = time.monotonic() + asked.slower * (asked.seconds or (RAY_SECONDS if asked.ray else SECONDS))
    for part in chosen:
        left, limit = ends - time.monotonic(), asked.slower * part.limit
        if left < LEAST * limit:
            found: dict[str, Any] = {"part": part.name, "left out": f"{max(left, 0):.0f} s left of {limit:g}"}
        else:
            found = measured(part, options, limit=min(limit, left), log=asked.results.with_suffix(".log"))
        line = json.dumps(found)
        with asked.results.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def measured(part: Part, options: Sequence[str], *, limit: float, log: Path) -> dict[str, Any]:
    """Run a part in a process of its own.

    Args:
        part: the part.
        options: its options on the command line.
        limit: seconds after which the process and its children are stopped.
        log: file that gets what it prints.

    Returns:
        What the results file gets.
    """
    with tempfile.TemporaryDirectory() as folder, log.open("ab") as output:
        figures = Path(folder) / "figures"
        output.write(f"\n== {part.name}\n".encode())
        output.flush()
        command = [sys.executable, "-m", "benchmarks.speed.slot.one", part.function, str(figures), *options]
        began = time.monotonic()
        process = subprocess.Popen(
            command, env=_environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = process.wait(timeout=limit)
            error = None if code == 0 else f"exit code {code}: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            error = f"stopped after {limit:.3g} s"
        finally:
            _end(process)
        lines = [json.loads(line) for line in figures.read_text().splitlines()] if figures.exists() else []
    device = lines[0] if lines else {}
    found = {key: value for line in lines[1:] for key, value in line.items()}
    seconds = round(time.monotonic() - began, 1)
    return {"part": part.name, "seconds": seconds, "limit": round(limit), **device, "error": error, "figures": found}


def _environment() -> dict[str, str]:
    """Return that of the parts: they keep their bytecode for each other, and ask no hub."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    cache = str(Path(tempfile.gettempdir()) / "slot_bytecode")
    return {"PYTHONPYCACHEPREFIX": cache, **kept, "HF_HUB_OFFLINE": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children, which hold GPU memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


if __name__ == "__main__":
    main()
