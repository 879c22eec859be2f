"""The cost of reading the status, on an idle machine.

    python -m benchmarks.speed.status_load one --seconds 60 --rate 200 --iterations 8
    python -m benchmarks.speed.status_load many --runs 300 --iterations 5000

`one` sends 200 requests per second of `GET /runs/{run}` during a toy run. The run uses the first core, the server and
the client the last one. Windows with and without requests alternate (quiet, loaded, loaded, quiet, ...) within one run,
so that drifts affect both equally. An iteration counts if it lies entirely within one window. The measurement ends
after at least `--seconds` of requests and `--iterations` in windows of each kind. A request's latency is measured from
the time at which it is due.

`many` serves a folder of ended runs with metrics as long as real ones. It measures the first `GET /runs` after the
start, later ones, `GET /metrics`, and the server's largest memory.
"""

import asyncio
import json
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
from typing import Annotated

import typer

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
"""Config of the run: after the start there is no evaluation, checkpoint or recording, and the policy hardly changes."""
PORT = 8497
CONNECTIONS = 16
WARM_UP = 3
"""Iterations at the start, and seconds of requests, that do not count."""
WINDOWS = 4
"""Windows with requests in `--seconds`."""
ITERATIONS = 4
"""Iterations that fit into a window; slow iterations make the windows longer."""
MOST_WINDOWS = 40
"""Windows with requests after which the measurement gives up."""
LONGEST_COST, LONGEST_P99_MS = 0.03, 50.0
LONGEST_FIRST_MS, LONGEST_LATER_MS, MOST_MIB = 1000.0, 50.0, 200.0
"""Goals for many runs: the first list, each later one, and the server's memory."""
LATER = 20
"""Lists of many runs after the first."""
DONE = re.compile(r"^(\S+ \S+) INFO \S+: iteration \d+ done", re.MULTILINE)
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Window = tuple[float, float]

app = typer.Typer(help=__doc__, add_completion=False)


@app.command()
def one(
    seconds: Annotated[float, typer.Option(help="Least total seconds of requests.", min=1.0)] = 60.0,
    rate: Annotated[float, typer.Option(help="Requests per second.", min=1.0)] = 200.0,
    iterations: Annotated[int, typer.Option(help="Least iterations in windows of each kind.", min=2)] = 8,
) -> None:
    """Measure how much 200 status requests per second slow a run down, and the latency of the requests."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise typer.BadParameter("the run and the server need one core each, but this process may use only one")
    say(f"cores: run {cores[0]}, server and client {cores[-1]}; load before {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        run = pinned(["train", "toy_geneval", "--local", "--run", str(folder), *RUN], cores[0])
        os.sched_setaffinity(0, {cores[-1]})
        server = None
        try:
            while len(ends(folder)) < WARM_UP:
                if run.poll() is not None:
                    raise RuntimeError(f"the run has ended with exit code {run.returncode}")
                time.sleep(0.5)
            server = pinned(["serve", str(folder), "--port", str(PORT)], cores[-1])
            quiet, loaded, latencies = asyncio.run(measured(folder, seconds=seconds, rate=rate, iterations=iterations))
        finally:
            for process in (server, run):
                if process:
                    process.terminate()
                    process.wait()
    show(quiet, loaded, latencies)


@app.command()
def many(
    runs: Annotated[int, typer.Option(help="Ended runs in the folder.", min=1)] = 300,
    iterations: Annotated[int, typer.Option(help="Iterations of each run.", min=1)] = 5_000,
) -> None:
    """Measure how long the list of many ended runs takes, and the server's memory."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        size = write_runs(folder, runs=runs, iterations=iterations)
        say(f"{runs} runs of {iterations} iterations, {size / 1e6:.1f} MB of metrics each")
        server = pinned(["serve", str(folder), "--port", str(PORT)], max(os.sched_getaffinity(0)))
        try:
            first, *later, scrape = asyncio.run(listed(server.pid))
            peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{server.pid}/status").read_text())
        finally:
            server.terminate()
            server.wait()
    assert peak is not None
    for name, spans, goal in (("first GET /runs", [first], LONGEST_FIRST_MS), ("later ones", later, LONGEST_LATER_MS)):
        middle, longest = statistics.median(wall for wall, _ in spans), max(spans)[0]
        cpu = statistics.median(cpu for _, cpu in spans)
        verdict = "met" if middle < goal else "MISSED"
        say(f"{name}: median {middle:.0f} ms, longest {longest:.0f}, CPU time {cpu:.0f}; goal {goal:g}: {verdict}")
    say(f"GET /metrics: {scrape[0]:.0f} ms, CPU time {scrape[1]:.0f}")
    held = int(peak[1]) / 1024
    say(f"largest memory of the server: {held:.0f} MiB, goal {MOST_MIB:g}: {'met' if held < MOST_MIB else 'MISSED'}")


def write_runs(folder: Path, *, runs: int, iterations: int) -> int:
    """Write run folders of ended runs as `flowcredit train` leaves them, without checkpoints.

    Args:
        folder: takes them.
        runs: their number.
        iterations: of each run.

    Returns:
        Bytes of each run's metrics.
    """
    from deploy.folder.names import CONFIG, METRICS, STATUS
    from deploy.folder.read import StatusFile
    from deploy.presets import load_config
    from protocol.status import Event, Rewards, RunStatus

    by_step = (
        "step_reward/step_{}_abs_mean",
        "step_reward/step_{}_zero_share",
        "advantage/step_{}_mean",
        "advantage/step_{}_std",
    )
    names = [name.format(step) for step in range(10) for name in by_step]
    numbers = {"reward/mean": 0.75, "train/loss": -1e-5} | dict.fromkeys(names, 0.1234567890123456)
    lines = [json.dumps({"iteration": n} | numbers) for n in range(1, iterations + 1)]
    metrics = "".join(f"{line}\n" for line in lines).encode()
    events = [Event(number=n, time=0.0, kind="info", message=f"checkpoint of iteration {n}") for n in range(1, 201)]
    config = load_config("toy_geneval").to_yaml()
    for number in range(runs):
        run = folder / f"run_{number:04d}"
        run.mkdir()
        facts = {"run": run.name, "session": "s", "phase": "finished", "rewards": Rewards(now=0.75)}
        counts = {"iteration": iterations, "iterations": iterations, "lines": iterations}
        status = RunStatus.model_validate(facts | counts | {"started": 0.0, "updated": float(number)})
        (run / CONFIG).write_text(config)
        (run / METRICS).write_bytes(metrics)
        (run / STATUS).write_text(StatusFile(status=status, events=events).model_dump_json())
    return len(metrics)


async def listed(server: int) -> list[tuple[float, float]]:
    """Ask for a first list, for `LATER` more and for a scrape of Prometheus.

    Returns:
        Milliseconds of each, on the clock and of the server's CPU time; `server` is its process.
    """
    import psutil

    process, spans = psutil.Process(server), []
    for path in (*["/runs"] * (LATER + 1), "/metrics"):
        client = Client(path)
        client.connect(await connected())
        before = sum(process.cpu_times()[:2])
        await client.once(time.perf_counter())
        spans.append((1000 * client.latencies[0], 1000 * (sum(process.cpu_times()[:2]) - before)))
        await asyncio.sleep(1.0)  # longer than the server keeps a list
    return spans


async def measured(
    folder: Path, *, seconds: float, rate: float, iterations: int
) -> tuple[list[float], list[float], list[float]]:
    """Measure iterations and requests.

    Args:
        folder: the run folder.
        seconds: least total seconds of requests.
        rate: requests per second.
        iterations: least number of iterations in windows of each kind.

    Returns:
        Seconds of each iteration in windows without requests, of each in windows with requests, and of each request.
    """
    client = Client(f"/runs/{folder.name}")
    await client.ask(rate=rate, seconds=WARM_UP)
    client.latencies.clear()
    iteration_s = statistics.median(last - first for first, last in pairwise(ends(folder)))
    length = max(seconds / WINDOWS, ITERATIONS * iteration_s)
    windows: dict[bool, list[Window]] = {False: [], True: []}
    kinds: dict[bool, list[float]] = {False: [], True: []}
    while len(windows[True]) < WINDOWS or min(map(len, kinds.values())) < iterations:
        if len(windows[True]) == MOST_WINDOWS:
            raise RuntimeError(f"the run is too slow: {len(kinds[True])} iterations in {MOST_WINDOWS} windows")
        is_even = len(windows[True]) % 2 == 0
        for is_loaded in (not is_even, is_even):
            began = time.time()
            if is_loaded:
                await client.ask(rate=rate, seconds=length)
            else:
                await asyncio.sleep(length)
            windows[is_loaded].append((began, time.time()))
        kinds = {kind: within(ends(folder), held) for kind, held in windows.items()}
        say(f"{len(windows[True])} windows of each kind, {min(map(len, kinds.values()))} of {iterations} iterations")
    return kinds[False], kinds[True], client.latencies


class Client:
    """Sends requests over connections that last for a window. It uses no client library, so the server is measured."""

    def __init__(self, path: str) -> None:
        self.latencies: list[float] = []
        self._request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
        self._free: asyncio.Queue[Connection] = asyncio.Queue()

    def connect(self, connection: Connection) -> None:
        """Use this connection too."""
        self._free.put_nowait(connection)

    async def ask(self, *, rate: float, seconds: float) -> None:
        """Send requests at a fixed rate, whether or not earlier ones have been answered."""
        for _ in range(CONNECTIONS):
            self.connect(await connected())
        began, tasks = time.perf_counter(), []
        for number in range(int(rate * seconds)):
            due = began + number / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(self.once(due)))
        await asyncio.gather(*tasks)
        while not self._free.empty():
            self._free.get_nowait()[1].close()

    async def once(self, due: float) -> None:
        """Send one request that was due at this time of `perf_counter`."""
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
    """Connect to the server as soon as it has started."""
    for _ in range(600):
        try:
            return await asyncio.open_connection("127.0.0.1", PORT)
        except OSError:
            await asyncio.sleep(0.2)
    raise TimeoutError("the server has not started")


def ends(folder: Path) -> list[float]:
    """Read from the run's log when each iteration ended, in seconds since the epoch."""
    try:
        text = (folder / "run.log").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [datetime.strptime(found, "%Y-%m-%d %H:%M:%S,%f").timestamp() for found in DONE.findall(text)]


def within(ended: list[float], windows: list[Window]) -> list[float]:
    """Return the seconds of the iterations that lie entirely within one of the windows."""
    spans = list(pairwise(ended))
    return [last - first for first, last in spans if any(low <= first and last <= high for low, high in windows)]


def show(quiet: list[float], loaded: list[float], latencies: list[float]) -> None:
    """Print the figures, and whether they meet the goals.

    Args:
        quiet: seconds of each iteration in windows without requests.
        loaded: seconds of each iteration in windows with requests.
        latencies: seconds of each request.
    """
    ordered = sorted(latencies)
    shown = {quantile: 1000 * ordered[int(len(ordered) * quantile / 100)] for quantile in (50, 90, 99)}
    say(f"requests {len(ordered)}: " + ", ".join(f"p{q} {value:.1f} ms" for q, value in shown.items()))
    cost = statistics.median(loaded) / statistics.median(quiet) - 1
    error = math.hypot(*(relative_error(kind) for kind in (quiet, loaded)))
    for name, kind in (("quiet", quiet), ("loaded", loaded)):
        middle = statistics.median(kind)
        say(f"{name}: {len(kind)} iterations, median {middle:.3f} s, from {min(kind):.3f} to {max(kind):.3f}")
    say(f"iterations take {100 * cost:+.1f} % longer with requests, standard error {100 * error:.1f} %")
    say(f"goals: p99 below {LONGEST_P99_MS:g} ms {'met' if shown[99] < LONGEST_P99_MS else 'MISSED'}")
    verdict = "unknown: iterations vary too much; use more --iterations on an idle machine"
    if cost + 2 * error <= LONGEST_COST:
        verdict = "met"
    elif cost - 2 * error > LONGEST_COST:
        verdict = "MISSED"
    say(f"       at most {100 * LONGEST_COST:g} % longer, within two standard errors: {verdict}")


def relative_error(spans: list[float]) -> float:
    """Return the standard error of the median divided by the median (for normal noise)."""
    return 1.25 * statistics.stdev(spans) / math.sqrt(len(spans)) / statistics.median(spans)


def pinned(words: list[str], core: int) -> "subprocess.Popen[bytes]":
    """Start a `flowcredit` command on one core."""
    return subprocess.Popen(
        [sys.executable, "-m", "flowcredit", *words],
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )


def say(line: str) -> None:
    """Print a line and flush it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    app()
