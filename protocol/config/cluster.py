"""Where a run computes: its actors, their resources and deadlines."""

from pydantic import Field

from protocol.config.section import Positive, Section


class RoleConfig(Section):
    """What one kind of actor may use."""

    threads: Positive = 1
    """CPU threads of torch; part of the config because sums depend on it."""
    cpus: float = Field(default=1.0, ge=0.0)
    """CPUs that Ray reserves for one actor."""
    gpus: float = Field(default=0.0, ge=0.0)
    """GPUs that Ray reserves for one actor."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds after which one call counts as failed and the actor is replaced."""


class ClusterConfig(Section):
    """Where it runs. Nothing here may change a result but `threads`, and whether there are `gpus`: they round."""

    address: str | None = None
    """Ray address; none starts a local cluster on loopback and stops it with the run. RAY_ADDRESS counts as given."""
    rollout_actors: Positive = 2
    """Rollout actors that draw in parallel."""
    max_restarts: int = Field(default=10, ge=0)
    """Lost actors that one pool replaces within `restart_window_s` before the run stops; the learner's own likewise."""
    restart_window_s: float = Field(default=3600.0, gt=0.0)
    """Seconds after which a loss no longer counts."""
    heartbeat_s: float = Field(default=60.0, gt=0.0)
    """Seconds within which an actor at work must give a sign of life; one that does not is replaced."""
    stop_within_s: float = Field(default=60.0, gt=0.0)
    """Seconds a stop may wait for the update in progress; then the run ends with the checkpoint it has."""
    rollout: RoleConfig = RoleConfig()
    reward: RoleConfig = RoleConfig()
    learner: RoleConfig = RoleConfig()
