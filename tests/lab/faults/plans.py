"""Plans of faults: which harm is done to a run at which of its iterations, by a seed."""

import random
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from tests.lab.faults.disks import fill
from tests.lab.faults.two_nodes import KINDS, TwoNodes, harm_board, two_nodes
from tests.support.runs.scene import Driver

Fault = Callable[[TwoNodes, Driver], object]
KILL_DRIVER = "kill driver"
FULL_DISK = "full disk"
SLEEP_S = 12.0
"""A stopped driver sleeps for longer than two heartbeats of its actors."""


def _harm(kind: str, number: signal.Signals) -> Fault:
    def fault(nodes: TwoNodes, driver: Driver) -> None:
        begin = len(driver.said)
        nodes.harm(kind, number)
        if kind == "learner":  # iterations take 0.1 s: the next fault, such as a killed driver, would hide this one
            driver.wait_for(lambda line: line.startswith("learner worker ") and " failed: " in line, begin=begin)

    return fault


def _stop_driver(_: TwoNodes, driver: Driver) -> None:
    driver.process.send_signal(signal.SIGSTOP)
    time.sleep(SLEEP_S)
    driver.process.send_signal(signal.SIGCONT)


def _full_disk(_: TwoNodes, driver: Driver) -> None:
    """Nothing can be written for the rest of an iteration; the run folder must lie on a small disk of its own."""
    begin = len(driver.said)
    filler = fill(driver.run.parent)
    try:
        driver.wait_for(lambda line: "cannot be written: No space left on device" in line, begin=begin)
    finally:
        filler.unlink()


FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        **{f"kill {kind}": _harm(kind, signal.SIGKILL) for kind in KINDS},
        **{f"stop {kind}": _harm(kind, signal.SIGSTOP) for kind in KINDS},
        "kill raylet": lambda nodes, _: nodes.harm_worker_raylet(signal.SIGKILL),
        "kill board": lambda _, driver: harm_board(driver, signal.SIGKILL),
        "stop board": lambda _, driver: harm_board(driver, signal.SIGSTOP),
        KILL_DRIVER: lambda _, driver: driver.kill(),
    }
)
"""Each once in the test."""
ALL_FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        **FAULTS,
        "stop raylet": lambda nodes, _: nodes.harm_worker_raylet(signal.SIGSTOP),
        "stop driver": _stop_driver,
        FULL_DISK: _full_disk,
    }
)
"""Each once in a plan of the soak."""


def plan(seed: int, names: Iterable[str]) -> list[tuple[int, str]]:
    """When which fault comes: each once, at iterations drawn by the seed."""
    numbers = random.Random(seed)
    shuffled = list(names)
    numbers.shuffle(shuffled)
    moments = sorted(numbers.sample(range(1, 18), len(shuffled)))
    return list(zip(moments, shuffled, strict=True))


def disturbed(path: Path, run: Path, *, seed: int, names: Iterable[str]) -> list[str]:
    """Run on two nodes under a plan of faults; what was done."""
    done = []
    with two_nodes() as nodes:
        words = (f"cluster.address={nodes.address}",)
        driver = Driver(path, run, *words)
        try:
            for moment, name in plan(seed, names):
                driver.wait_for_iteration(moment)
                done.append(name)
                ALL_FAULTS[name](nodes, driver)
                if name == KILL_DRIVER:
                    driver = Driver(path, run, *words)
            driver.finish()
        finally:
            driver.kill()
    return done
