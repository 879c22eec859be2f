"""Where the actors of `cluster.layout: colocated` run: bundle i holds rollout actor i, learner worker i and their
successors. The bundles are one Ray placement group, reserved together or not at all, so that two runs never hold half
of a cluster each. The group belongs to the Ray job and ends with it at the latest.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from protocol.config.cluster import ClusterConfig
from protocol.config.run import RunConfig

ProcessOf = Callable[[int, str, RunConfig], Any]
"""Returns the process of a bundle that is to take a role: slot, role, config."""
WAIT_S = 1.0
"""Seconds for which a thread waits for the bundles at a time; the end of a run waits for the thread."""


class Bundles:
    """Bundles of resources, reserved as soon as the cluster has room; until then the actors wait."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._needs = {name: need for name, need in cluster.bundle_reserved.items() if need}
        self._count = cluster.rollout_actors
        role = cluster.rollout
        self._group = placement_group(
            [self._needs] * self._count,
            strategy="SPREAD" if role.placement == "spread" else "PACK",
            bundle_label_selector=[role.labels] * self._count if role.labels else None,  # pyrefly: ignore[bad-argument-type]
        )

    def options(self, slot: int) -> Mapping[str, Any]:
        """Return Ray options that put an actor into the bundle of this slot."""
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=slot)}

    async def reserved(self) -> None:
        """Return when all bundles are reserved; it waits as long as the actors in them do.

        Actors with a part of a GPU outside the bundles start afterwards: before, Ray puts them on one GPU, and then no
        bundle fits there.
        """
        while not await asyncio.to_thread(self._group.wait, WAIT_S):
            pass

    def shortage(self, nodes: Sequence[Mapping[str, float]]) -> str:
        """Say which bundles lack room.

        Returns:
            One line; empty if they have room or are reserved.
        """
        state: Mapping[str, Any] = placement_group_table(self._group)
        if state["state"] == "CREATED":
            return ""
        return shortage_of_bundles(self._needs, nodes, count=self._count)

    def remove(self) -> None:
        """Give the bundles back and end the actors that still run in them."""
        remove_placement_group(self._group)


def shortage_of_bundles(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]], *, count: int) -> str:
    """Say how many bundles find no room.

    Args:
        needs: what one bundle reserves, by resource; each above 0.
        count: bundles that are reserved together.

    Returns:
        One line; empty if all have room.
    """
    room = sum(min(int(node.get(name, 0.0) / need + 1e-6) for name, need in needs.items()) for node in nodes)
    if room >= count:
        return ""
    each = " and ".join(f"{need:g} {name}" for name, need in needs.items())
    return (
        f"{count} bundles of a rollout actor and a learner worker are reserved together, each with {each} on one node;"
        f" the cluster has room for {room}"
    )
