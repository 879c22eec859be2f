"""What reading the status costs: 200 requests a second of `GET /runs/{run}` beside a toy run, on a machine left alone.

    python -m benchmarks.speed.status_load --seconds 60 --rate 200 --iterations 8

One run goes on the first core; the server and the client share the last one. Windows with and without requests take
turns (quiet, asked, asked, quiet, ...) in the same run, so that what drifts meets both alike; an iteration counts where
it lies whole within one window. The measurement ends when requests were made for `--seconds` in all and both kinds of
window hold `--iterations`. A request's latency counts from the moment at which it was due.
"""

import argparse
import asyncio
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

RUN = [
    "group.size=8",
    "group.shard=8",
    "group.per_iteration=2",
    "evaluation.images_per_prompt=1",
    "evaluation.every=0",
    "data.tags=[colors]",
    "cluster.learner.threads=1",
    "cluster.rollout.threads=1",
    "learner.learning_rate=1e-9",
    "checkpoint.every=100000",
    "status.trajectories_every=100000",
    "iterations=100000",
]
"""Nothing comes in between: no evaluation, checkpoint or recording after the start; and the policy stays what it is."""
PORT = 8497
CONNECTIONS = 16
WARM_UP = 3
"""First iterations, and seconds of requests, that are not counted."""
WINDOWS = 4
"""With requests, in `--seconds`."""
ITERATIONS = 4
"""That a window has room for; slow ones make the windows longer."""
MOST_WINDOWS = 40
LONGEST_COST, LONGEST_P99_MS = 0.03, 50.0
DONE = re.compile(r"^(\S+ \S+) INFO deploy\.run: iteration \d+ done", re.MULTILINE)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Window = tuple[float, float]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--iterations", type=int, default=8)
    words = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error("the run and the server need a core each; this process may use one only")
    say(f"cores: run {cores[0]}, server and client {cores[-1]}; load before {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        run = pinned(["train", "toy_geneval", "--local", "--run", str(folder), *RUN], cores[0])
        os.sched_setaffinity(0, {cores[-1]})
        server = None
        try:
            while len(ends(folder)) < WARM_UP:
                if run.poll() is not None:
                    raise RuntimeError(f"the run has ended with code {run.returncode}")
                time.sleep(0.5)
            server = pinned(["serve", str(folder), "--port", str(PORT)], cores[-1])
            quiet, asked, latencies = asyncio.run(measured(folder, words))
        finally:
            for process in (server, run):
                if process:
                    process.terminate()
                    process.wait()
    show(quiet, asked, latencies)


async def measured(folder: Path, words: argparse.Namespace) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each iteration in windows without and with requests, and of each request."""
    client = Client(f"/runs/{folder.name}")
    await client.ask(rate=words.rate, seconds=WARM_UP)
    client.latencies.clear()
    iteration_s = statistics.median(last - first for first, last in pairwise(ends(folder)))
    length = max(words.seconds / WINDOWS, ITERATIONS * iteration_s)
    windows: dict[bool, list[Window]] = {False: [], True: []}
    kinds: dict[bool, list[float]] = {False: [], True: []}
    while len(windows[True]) < WINDOWS or min(map(len, kinds.values())) < words.iterations:
        if len(windows[True]) == MOST_WINDOWS:
            raise RuntimeError(f"the run does not get on: {len(kinds[True])} iterations in {MOST_WINDOWS} windows")
        is_even = len(windows[True]) % 2 == 0
        for is_asked in (not is_even, is_even):
            began = time.time()
            if is_asked:
                await client.ask(rate=words.rate, seconds=length)
            else:
                await asyncio.sleep(length)
            windows[is_asked].append((began, time.time()))
        kinds = {kind: within(ends(folder), held) for kind, held in windows.items()}
    return kinds[False], kinds[True], client.latencies


class Client:
    """Asks over connections kept for a window, with no client library: what is measured is the server."""

    def __init__(self, path: str) -> None:
        self.latencies: list[float] = []
        self._request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        self._free: asyncio.Queue[Connection] = asyncio.Queue()

    async def ask(self, *, rate: float, seconds: float) -> None:
        """Requests are due at a fixed rate, whether or not earlier ones have been answered."""
        for _ in range(CONNECTIONS):
            self._free.put_nowait(await connected())
        began, tasks = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self._once(due)))
        await asyncio.gather(*tasks)
        while not self._free.empty():
            self._free.get_nowait()[1].close()

    async def _once(self, due: float) -> None:
        reader, writer = connection = await self._free.get()
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(head.decode())
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        await reader.readexactly(int(length.partition(b":")[2]))
        self.latencies.append(time.perf_counter() - due)
        self._free.put_nowait(connection)


async def connected() -> Connection:
    """A connection to the server, once it has started."""
    for _ in range(600):
        try:
            return await asyncio.open_connection("127.0.0.1", PORT)
        except OSError:
            await asyncio.sleep(0.2)
    raise TimeoutError("the server has not started")


def ends(folder: Path) -> list[float]:
    """When each iteration ended, as the run itself wrote it down."""
    try:
        text = (folder / "run.log").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [datetime.strptime(found, "%Y-%m-%d %H:%M:%S,%f").timestamp() for found in DONE.findall(text)]


def within(ended: list[float], windows: list[Window]) -> list[float]:
    """Seconds of the iterations that lie whole within one of the windows."""
    spans = list(pairwise(ended))
    return [last - first for first, last in spans if any(low <= first and last <= high for low, high in windows)]


def show(quiet: list[float], asked: list[float], latencies: list[float]) -> None:
    """The figures, and whether the aims are met."""
    ordered = sorted(latencies)
    shown = {quantile: 1000 * ordered[int(len(ordered) * quantile / 100)] for quantile in (50, 90, 99)}
    say(f"requests {len(ordered)}: " + ", ".join(f"p{q} {value:.1f} ms" for q, value in shown.items()))
    cost = statistics.median(asked) / statistics.median(quiet) - 1
    error = math.hypot(*(relative_error(kind) for kind in (quiet, asked)))
    for name, kind in (("quiet", quiet), ("asked", asked)):
        middle = statistics.median(kind)
        say(f"{name}: {len(kind)} iterations, median {middle:.3f} s, from {min(kind):.3f} to {max(kind):.3f}")
    say(f"cost {100 * cost:+.1f} % of the pace, standard error {100 * error:.1f} %")
    say(f"aims: p99 below {LONGEST_P99_MS:g} ms {'met' if shown[99] < LONGEST_P99_MS else 'MISSED'}")
    verdict = "cannot be told: the pace varies too much; more --iterations, and is the machine quiet?"
    if cost + 2 * error <= LONGEST_COST:
        verdict = "met"
    elif cost - 2 * error > LONGEST_COST:
        verdict = "MISSED"
    say(f"      cost at most {100 * LONGEST_COST:g} %, within two standard errors: {verdict}")


def relative_error(spans: list[float]) -> float:
    """Standard error of the median, as a share of it (for normal noise)."""
    return 1.25 * statistics.stdev(spans) / math.sqrt(len(spans)) / statistics.median(spans)


def pinned(words: list[str], core: int) -> "subprocess.Popen[bytes]":
    """One of our commands on one core."""
    return subprocess.Popen(
        [sys.executable, "-m", "deploy", *words],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


def say(line: str) -> None:
    """A line on the terminal, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
