"""Room for every role in a cluster that has too little for all actors.

A run goes on while each role has an actor: the learner, the rollout actors, each reward. So a role without an actor
gets room before the other roles get further actors:

| while a role has no actor         | the other roles                                                                  |
|-----------------------------------|----------------------------------------------------------------------------------|
| always                            | are held: they begin no further actor, and withdraw actors that wait for a node  |
| if it waits for a node for        | end as few actors as make room for one of it, and keep at least one each         |
| `GRACE_S`                         |                                                                                  |

Afterwards all grow to their desired sizes again, as far as there is room. Every number of actors gives the same bits.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from ray.exceptions import RayError

from actors.pool.calls import Member
from actors.pool.nodes import free_resources, node_table
from protocol.errors import one_line

log = logging.getLogger(__name__)
LOOK_S = 2.0
"""Seconds between two looks at Ray's node table."""
GRACE_S = 10.0
"""Seconds for which a role without an actor waits before others end theirs; a process needs some of them to start."""
SPARED = ("starting", "idle", "busy")
"""States of actors that may end for another role, in the order in which they end."""
SLACK = 1e-6
"""Largest rounding error of a sum of fractional resources."""
Free = Mapping[str, Mapping[str, float]]
"""Free resources of each node that is alive, by node id and resource."""


class Role(Protocol):
    """A pool or the learner group."""

    name: str

    @property
    def is_empty(self) -> bool:
        """Whether no actor is ready."""
        ...

    @property
    def members(self) -> list[Member]:
        """Its actors, ready or starting."""
        ...

    def scale(self, size: int) -> None:
        """Ask for another size."""
        ...

    def hold(self, role: str) -> None:
        """Leave free room to another role until `release`."""
        ...

    def release(self) -> None:
        """Grow to the desired size again."""
        ...

    def give(self, member: Member) -> None:
        """End an actor for another role, while it is held."""
        ...

    def lose(self, nodes: Collection[str]) -> None:
        """End the actors on these nodes, which are dead, by their ids."""
        ...


class Room:
    """Lets a role without an actor have the room of others.

    room = Room(lambda: [learner, rollouts], reserved=lambda name: {"CPU": 1.0})
    watching = asyncio.create_task(room.watch())
    """

    def __init__(self, roles: Callable[[], Sequence[Role]], *, reserved: Callable[[str], Mapping[str, float]]) -> None:
        """
        Args:
            roles: returns the roles, most needed first; a reward's pool may be replaced meanwhile.
            reserved: what one actor of a role reserves, by resource.
        """
        self._roles = roles
        self._reserved = reserved
        self._stuck_since: dict[str, float] = {}

    async def watch(self) -> None:
        """Look every `LOOK_S`, until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                dead, free = await asyncio.to_thread(_look_at_nodes)
            except (RayError, RuntimeError) as error:  # its head is away
                log.warning("Ray's node table could not be read: %s", one_line(error))
            else:
                self.look(dead, free)

    def look(self, dead: Collection[str], free: Free) -> None:
        """Hold or release the roles, and make room.

        Args:
            dead: ids of dead nodes.
            free: what the other nodes have free.
        """
        roles = self._roles()
        for role in roles:
            role.lose(dead)
        empty = [role for role in roles if role.is_empty]
        for role in roles:
            needy = next((other for other in empty if other is not role), None)
            if needy:
                role.hold(needy.name)
            else:
                role.release()
        now = asyncio.get_running_loop().time()
        stuck = [role for role in empty if role.members and all(each.state == "waiting" for each in role.members)]
        self._stuck_since = {role.name: self._stuck_since.get(role.name, now) for role in stuck}
        for role in stuck:
            if now - self._stuck_since[role.name] >= GRACE_S and (ending := self._fewest(role, roles, free)):
                log.warning(
                    "%s has no actor, and no node has room for one; these end for it: %s",
                    role.name,
                    ", ".join(f"{giver.name}-{member.slot}" for giver, member in ending),
                )
                for giver, member in ending:
                    giver.give(member)
                self._stuck_since[role.name] = now
                return  # what is free is known only at the next look

    def _fewest(self, needy: Role, roles: Sequence[Role], free: Free) -> list[tuple[Role, Member]]:
        """Choose the fewest actors on one node whose end makes room there; empty if a node has room, or none can.

        Learner workers come last: their end costs the iterations since the checkpoint.
        """
        found = [ending for node, room in free.items() if (ending := self._on(node, room, needy, roles)) is not None]
        return min(found, key=lambda each: (any(giver is roles[0] for giver, _ in each), len(each)), default=[])

    def _on(
        self, node: str, room: Mapping[str, float], needy: Role, roles: Sequence[Role]
    ) -> list[tuple[Role, Member]] | None:
        """Choose actors on a node whose end makes room there; None if that is not enough."""
        needs, left = self._reserved(needy.name), dict(room)
        ending: list[tuple[Role, Member]] = []
        for giver, member in _spare(node, needy, roles):
            lacking = [name for name, need in needs.items() if left.get(name, 0.0) < need - SLACK]
            held = self._reserved(giver.name)
            if any(held.get(name) for name in lacking):
                ending.append((giver, member))
                left = {name: left.get(name, 0.0) + held.get(name, 0.0) for name in {**left, **held}}
        return ending if has_room(needs, left) else None


def has_room(needs: Mapping[str, float], free: Mapping[str, float]) -> bool:
    """Tell whether a node with these free resources has room for an actor."""
    return all(free.get(name, 0.0) >= need - SLACK for name, need in needs.items())


def _spare(node: str, needy: Role, roles: Sequence[Role]) -> list[tuple[Role, Member]]:
    """List the actors on a node that other roles can do without, the largest role's first, workers last."""
    spare: list[tuple[Role, Member]] = []
    on_nodes = {role.name: [each for each in role.members if each.state in SPARED] for role in roles}
    for role in sorted(roles, key=lambda role: (role is roles[0], -len(on_nodes[role.name]))):
        if role is not needy:
            held = sorted(on_nodes[role.name], key=lambda member: SPARED.index(member.state))
            here = [member for member in held if member.node_id == node]
            spare += [(role, member) for member in here[: len(held) - 1]]
    return spare


def _look_at_nodes() -> tuple[set[str], Free]:
    alive, dead = node_table()
    free = free_resources()
    return dead, {node: free.get(node, {}) for node in alive}
