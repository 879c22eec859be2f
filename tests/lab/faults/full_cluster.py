"""A cluster without a free CPU loses a node: which actors stood where, and for how long the run did not go on.

    python -m tests.lab.faults.full_cluster [--only cable,RR-RL-LW] [--nodes 1,2]

Three machines of two CPUs hold 3 rollout actors (R), 2 learner workers (L) and 1 reward actor (W). Every fault hits
each node but the head in each layout; each run ends with the bits of an undisturbed one. It prints a row for each.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from protocol.errors import one_line
from tests.lab.faults.cluster import Cluster
from tests.lab.faults.lab import Lab, Machine, until
from tests.support.runs.scene import Story

FULL = ("cluster.rollout_actors=3", "cluster.learner.workers=2")
ACTORS = 6
LAYOUTS = {
    "RL-RL-RW": ("cluster.rollout.placement=spread",),
    "RR-RL-LW": ("cluster.rollout.placement=pack", "cluster.learner.placement=spread"),
    "RR-RW-LL": ("cluster.rollout.placement=pack", "cluster.learner.placement=pack"),
}
"""The ways to put them on three nodes, and words that favour each; all start at once, so the row says what came."""
LETTERS = {"rollout": "R", "learner": "L", "reward/redness": "W"}
FAULTS = ("cable", "kill", "power")
"""The cable is pulled, Ray's processes are killed and started again by their service, the power is cut."""
GOAL_S = 60.0
"""Seconds beyond Ray's detection within which a run goes on."""


@dataclass(frozen=True)
class Loss:
    """What a fault did to a run."""

    fault: str
    layout: str
    """Of the head and of each node; the lost one in parentheses."""
    detected_s: float
    """Seconds from the fault until Ray calls the node dead."""
    lost_s: float
    """Seconds from there until a new iteration is done, repeated ones included; 0 if the run had ended by then."""

    def row(self) -> str:
        """A row of the table."""
        return f"| {self.fault} | {self.layout} | {self.detected_s:.0f} | {self.lost_s:.0f} |"


def lose(cluster: Cluster, fault: str, layout: str, expected: Story, *, number: int | None = None) -> Loss:
    """Run with a node that is lost after the first iteration, to the same bits, and leave the cluster whole.

    Args:
        cluster: nothing else runs on it.
        fault: one of `FAULTS`.
        layout: one of `LAYOUTS`.
        expected: of the undisturbed run.
        number: index of the node that is lost; default: the one with most learner workers.

    Returns:
        How long it took.
    """
    run = f"full-{fault}-{layout}-{'' if number is None else number}".lower().rstrip("-")
    job = cluster.submit(run, *FULL, *LAYOUTS[layout], held_after=1)
    job.wait_for_iteration(1)
    until(lambda: sum(map(len, _held(cluster, run).values())) == ACTORS, f"the status of {run} names all actors")
    held = _held(cluster, run)
    node = (
        cluster.nodes[number] if number is not None else max(cluster.nodes, key=lambda node: held[node.name].count("L"))
    )
    shown = "-".join(f"({kinds})" if name == node.name else kinds for name, kinds in held.items())
    dead = cluster.dead_nodes()
    began = time.monotonic()
    _harm(node, fault)
    cluster.release()
    try:
        until(lambda: cluster.dead_nodes() > dead, f"Ray calls {node.name} dead")
        detected, reached = time.monotonic(), cluster.iteration(run)
        what = f"{run} goes on; on the nodes: {_held(cluster, run)}"
        until(lambda: job.has_ended or cluster.iteration(run) > reached, what, seconds=300)
        loss = Loss(fault, shown, detected - began, time.monotonic() - detected)
        job.finish()
    finally:
        _mend(cluster, node, fault)
    cluster.require_undisturbed(run, expected)
    return loss


def _harm(node: Machine, fault: str) -> None:
    if fault == "cable":
        node.cut()
    elif fault == "power":
        node.power_off()
    else:
        for process in node.processes("raylet|ray::"):
            process.kill()


def _mend(cluster: Cluster, node: Machine, fault: str) -> None:
    if fault == "cable":
        node.mend()
    elif fault == "power":
        cluster.start_node(node)
    cluster.wait_for_nodes(1 + len(cluster.nodes))


def _held(cluster: Cluster, run: str) -> dict[str, str]:
    """The letters of the actors on each machine, by its name."""
    actors = json.loads((cluster.run_folder(run) / "status.json").read_text())["status"]["actors"]
    machines = (cluster.head, *cluster.nodes)
    return {
        machine.name: "".join(
            sorted((LETTERS[each["kind"]] for each in actors if each["node"] == machine.name), reverse=True)
        )
        for machine in machines
    }


def main() -> None:
    """Run all pairs, or those that were asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults and layouts, with commas")
    parser.add_argument("--nodes", default="0,1", help="indices of the nodes that are lost")
    asked = parser.parse_args()
    only = set(filter(None, asked.only.split(",")))
    faults, layouts = ([each for each in all_ if not only & set(all_) or each in only] for all_ in (FAULTS, LAYOUTS))
    with tempfile.TemporaryDirectory() as folder, Lab(Path(folder) / "lab", machines=4) as lab:
        cluster = Cluster(lab)
        expected = cluster.undisturbed()
        cluster.start()
        _say("| fault | head-node-node | detected after s | lost beyond s |\n|---|---|---|---|")
        try:
            for fault, layout, number in product(faults, layouts, map(int, asked.nodes.split(","))):
                try:
                    _say(lose(cluster, fault, layout, expected, number=number).row())
                except AssertionError as error:
                    print(error, file=sys.stderr, flush=True)  # noqa: T201
                    _say(f"| {fault} | {layout} without {cluster.nodes[number].name} | | {one_line(error)} |")
        finally:
            cluster.stop()


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
