"""`cluster.layout: joint`: rollout actor and learner worker of a bundle in one process, with one copy of the model.

It takes one call at a time, for either side. Both sides die together. A rollout pool that notices it starts a process
for its side alone; the restart of the learner group then replaces every process by one for both sides.
"""

from typing import Any

import ray

from actors.learners import Learning
from actors.pool.bundles import Bundles
from actors.pool.calls import ActorHandle
from actors.pool.nodes import ray_options
from actors.rollouts import OPTIONS, RollingOut
from flow.device import devices_of, take_device
from flow.models.load import FrozenModel
from protocol.config.run import RunConfig


@ray.remote(**OPTIONS)
class JointActor(RollingOut, Learning):
    """Rolls out and learns, one call at a time, with one frozen model and an adapter for each side."""

    def __init__(self, config: RunConfig) -> None:
        RollingOut.__init__(self, config)
        Learning.__init__(self, config)
        self._frozen: FrozenModel | None = None

    def prepare(self) -> dict[str, str]:
        """Load what a rollout needs, like a rollout actor."""
        return self._load_policy(*self._model())

    def prepare_learner(self) -> dict[str, str]:
        """Load what the learner needs, like a learner worker."""
        return self._load_learner(*self._model())

    def _model(self) -> tuple[str, FrozenModel]:
        role = self._config.cluster.joint_role
        device = take_device(role)
        self._frozen = self._frozen or FrozenModel(self._config.model, devices_of(role))
        return device, self._frozen


class JointProcesses:
    """The newest process of each bundle."""

    def __init__(self, bundles: Bundles) -> None:
        self._bundles = bundles
        self._newest: dict[int, tuple[ActorHandle, set[str]]] = {}

    def of(self, slot: int, role: str, config: RunConfig) -> ActorHandle:
        """Return the process of a bundle that is to take a role; a new one if the newest has taken it before."""
        handle, roles = self._newest.get(slot, (None, {role}))
        if role in roles:
            options = ray_options(config.cluster.bundle_reserved) | dict(self._bundles.options(slot))
            actor_class: Any = JointActor
            handle, roles = self._newest[slot] = actor_class.options(**options).remote(config), set()
        roles.add(role)
        return handle

    def forget(self) -> None:
        """Let every role begin in a new process."""
        self._newest.clear()
