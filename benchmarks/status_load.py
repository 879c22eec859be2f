"""What reading the status costs: 200 requests a second of `GET /runs/{run}` beside a toy run.

    python -m benchmarks.status_load --seconds 60 --rate 200

Two toy runs are made of the same config, one after the other: one alone, one while the server is asked; both are pinned
to the first core (the run) and the last (server and client). Prints the latencies and the paces.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

RUN = [
    "group.size=8",
    "group.shard=8",
    "group.per_iteration=2",
    "evaluation.images_per_prompt=1",
    "data.tags=[colors]",
    "cluster.learner.threads=1",
    "checkpoint.every=1000",
]
PORT = 8497
CONNECTIONS = 16
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
WARM_UP = 3
"""First iterations that are not counted."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--iterations", type=int, default=150)
    words = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        alone = measured(folder / "alone", words.iterations, core=cores[0])
        os.sched_setaffinity(0, {cores[-1]})
        asked, latencies = beside(folder / "asked", words, core=cores[0], other=cores[-1])
    latencies.sort()
    shown = {f"p{q}": 1000 * latencies[int(len(latencies) * q / 100)] for q in (50, 90, 99)}
    sys.stdout.write(f"requests {len(latencies)}, " + ", ".join(f"{k} {v:.1f} ms" for k, v in shown.items()) + "\n")
    cost = asked / alone - 1
    sys.stdout.write(f"seconds an iteration: alone {alone:.3f}, asked {asked:.3f}, cost {100 * cost:+.1f} %\n")


def measured(folder: Path, iterations: int, *, core: int) -> float:
    """Median seconds of an iteration of a run by itself."""
    train(folder, iterations, core).wait()
    return pace(folder)


def beside(folder: Path, words: argparse.Namespace, *, core: int, other: int) -> tuple[float, list[float]]:
    """The same while the server is asked."""
    run = train(folder, words.iterations, core)
    while not lines(folder):
        time.sleep(0.5)
    server = pinned(["serve", str(folder), "--port", str(PORT)], other)
    try:
        latencies = asyncio.run(ask(f"/runs/{folder.name}", rate=words.rate, seconds=words.seconds))
        during = [line["seconds/iteration"] for line in lines(folder)[WARM_UP:]]
    finally:
        server.terminate()
        run.terminate()
        run.wait()
    return statistics.median(during), latencies


async def ask(path: str, *, rate: float, seconds: float) -> list[float]:
    """Seconds of each request; they start at a fixed rate, whether or not earlier ones have been answered.

    Over kept connections, with no client library: what is measured is the server.
    """
    free: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(await connected())
    request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    latencies: list[float] = []

    async def once() -> None:
        began = time.perf_counter()
        reader, writer = connection = await free.get()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        latencies.append(time.perf_counter() - began)
        free.put_nowait(connection)

    began, tasks = time.perf_counter(), []
    for number in range(int(rate * seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
        tasks.append(asyncio.create_task(once()))
    await asyncio.gather(*tasks)
    return latencies


async def connected() -> Connection:
    """A connection to the server, once it has started."""
    for _ in range(200):
        try:
            return await asyncio.open_connection("127.0.0.1", PORT)
        except OSError:
            await asyncio.sleep(0.2)
    raise TimeoutError("the server has not started")


def train(folder: Path, iterations: int, core: int) -> "subprocess.Popen[bytes]":
    return pinned(["train", "toy_geneval", "--local", "--run", str(folder), *RUN, f"iterations={iterations}"], core)


def pinned(words: list[str], core: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-m", "deploy", *words],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


def lines(folder: Path) -> list[dict]:
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [line for line in map(json.loads, text.splitlines()) if "seconds/iteration" in line]


def pace(folder: Path) -> float:
    return statistics.median(line["seconds/iteration"] for line in lines(folder)[WARM_UP:])


if __name__ == "__main__":
    main()
