"""The section `cluster`: actors, their resources and their deadlines."""

import os
from typing import Literal

from pydantic import Field, field_validator, model_validator

from protocol.config.section import CustomResources, Positive, Section


class RoleConfig(Section):
    """Resources and deadline of one kind of actor."""

    threads: Positive = 1
    """CPU threads of torch in one actor. They can change results by rounding, because they decide the order of sums.
    Where other programs keep the cores busy, `cluster.learner.threads=1` is steadier: a learner's threads spin while
    they wait for each other, and an update takes several times as long."""
    cpus: float = Field(default=1.0, ge=0.0)
    """CPUs that Ray reserves for one actor, at least 0; fractions are possible."""
    gpus: float = Field(default=0.0, ge=0.0)
    """GPUs that Ray reserves for one actor, at least 0; up to 1 fractions are possible. A fraction does not limit
    memory: an actor or bundle that takes too much ends with torch's out-of-memory error. With more than one, the blocks
    of a rollout actor's or learner worker's transformer lie on them, one GPU after the other. This needs
    `cluster.layout` `separate`, or `joint` with 1 GPU for each side, and an adapter that leaves out what all blocks
    read, such as the embedding of the time, as it does by default. Every number gives the same bits."""
    resources: CustomResources = Field(default_factory=dict)
    """Custom Ray resources of one actor, such as `{rollout: 1}`; it runs only on nodes that have them, for instance
    because of `ray start --resources '{"rollout": 1}'`."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes on which the actor may run, such as `{pool: rollout}` for nodes that `ray start --labels
    pool=rollout` started; Ray's expressions such as `in(a, b)` and `!a` are possible. Only with `cluster.address`."""
    placement: Literal["default", "pack", "spread"] = "default"
    """On which of the nodes with room the next actor runs. `default`: Ray's own rule, which prefers nodes in use until
    they are half full; `pack`: the node with the least room, so that few nodes are in use; `spread`: the nodes in turn.
    Of bundles only `spread` decides: on different nodes as far as possible, otherwise on few."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds that one call may take; then it counts as failed and the actor is replaced. An actor without any other
    in its pool waits as long for a node, and then counts as failed too. A run begins when every role has an actor and
    the others are ready or have waited so long."""

    @field_validator("gpus")
    @classmethod
    def _whole(cls, gpus: float) -> float:
        return _require_whole(gpus)

    @property
    def reserved(self) -> dict[str, float]:
        """What Ray reserves for one actor, by Ray's names."""
        return {"CPU": self.cpus, "GPU": self.gpus, **self.resources}


class LearnerRoleConfig(RoleConfig):
    """The learner group."""

    workers: Positive = 1
    """Learner workers W, each an actor with the resources of this section; a divisor of `learner.lanes`. Every W gives
    the same bits; `flowcredit scale RUN learner W` changes it during a run."""


class ClusterConfig(Section):
    """Where a run computes. Only `threads`, and whether `gpus` is above 0, can change a result, by rounding."""

    address: str | None = None
    """Address of a Ray cluster, which goes on after the run. Without one, and without RAY_ADDRESS in the environment,
    the run starts a local cluster, protected by Ray's token, with room for 4 more CPUs than the config asks for, and
    stops it at the end."""
    rollout_actors: Positive = 2
    """Rollout actors that generate trajectories in parallel, at least 1."""
    max_restarts: int = Field(default=10, ge=0)
    """Failed actors that each pool, and the learner, may replace within `restart_window_s`; one more stops the run.
    After one more in a reward pool its scores are missing instead, and `rewards.*.on_failure` decides. The first
    restart is immediate; later pauses grow from 0.5 to 30 s."""
    restart_window_s: float = Field(default=3600.0, gt=0.0)
    """Seconds for which a failed actor counts towards `max_restarts`; an older one counts until an actor has
    succeeded. After three failures on a node within these seconds replacements start on other nodes, if there are any;
    with labels or bundles only once Ray calls the node dead."""
    layout: Literal["separate", "colocated", "joint"] = "separate"
    """Who shares resources. `separate`: every actor has its own. `colocated`: each rollout actor shares its resources,
    for instance a GPU, with a learner worker, and the two take turns. Then there are as many rollout actors as learner
    workers, their `gpus` add up to at most 1, and `group.max_lag` is 0. `joint`: as `colocated`, and the two are one
    process with one copy of the frozen model and an adapter for each side; their `gpus` may add up to more, and both
    sides fail together. Their calls come one at a time, so `timeout_s` of each must also cover a call of the other.
    What two sides share, a bundle, is reserved with all other bundles, before the reward actors and within
    `cluster.learner.timeout_s`, and ends with the run's Ray job, also after `kill -9`. A run can be resumed in another
    layout; `--local` ignores it."""
    offload: bool = False
    """With `colocated`: whether the resting side keeps its transformer and VAE in host memory; optimizer, loaded text
    encoders and CUDA's own memory stay. A side copies its adapter to rest, and everything back to wake. All bundles of
    a node share one copy of the frozen weights, a memory file that needs no disk and no /dev/shm; a process takes it
    after comparing every bit with its own. Where the system refuses memory files, the log says so, and each resting
    side has its own copy."""
    heartbeat_s: float = Field(default=60.0, gt=0.0)
    """Seconds within which a busy actor must send a heartbeat; otherwise it is replaced."""
    stop_within_s: float = Field(default=60.0, gt=0.0)
    """Seconds that a stop waits for the update in progress; then the run ends with its newest checkpoint. With
    `--local` it waits for the computation in progress, however long."""
    rollout: RoleConfig = RoleConfig()
    """Resources of one rollout actor."""
    reward: RoleConfig = RoleConfig()
    """Resources of one reward actor; a reward may override them."""
    learner: LearnerRoleConfig = LearnerRoleConfig()
    """Number and resources of the learner workers."""

    @property
    def is_colocated(self) -> bool:
        """Whether a rollout actor and a learner worker share resources and take turns."""
        return self.layout != "separate"

    @property
    def is_joint(self) -> bool:
        """Whether a rollout actor and a learner worker are one process."""
        return self.layout == "joint"

    @property
    def joint_role(self) -> RoleConfig:
        """The role of a process that rolls out and learns."""
        return self.rollout.model_copy(update={"gpus": self.bundle_reserved["GPU"]})

    @property
    def roles(self) -> dict[str, RoleConfig]:
        """The kinds of actors by name."""
        return {"rollout": self.rollout, "reward": self.reward, "learner": self.learner}

    @property
    def bundle_reserved(self) -> dict[str, float]:
        """What Ray reserves for a rollout actor and the learner worker beside it, by Ray's names."""
        rollout, learner = self.rollout.reserved, self.learner.reserved
        return {name: rollout.get(name, 0.0) + learner.get(name, 0.0) for name in {**rollout, **learner}}

    @property
    def memory_remedy(self) -> str:
        """The remedy if an actor has too little memory because it shares a GPU; empty if it shares none."""
        if not self.is_colocated:
            return ""
        has_no_more = self.offload or self.is_joint
        keys = "cluster.layout=separate" if has_no_more else "cluster.offload=true or cluster.layout=separate"
        return f"a rollout actor and a learner worker share it in cluster.layout {self.layout}: set {keys}"

    @model_validator(mode="after")
    def _shareable(self) -> "ClusterConfig":
        """Check that a rollout actor and a learner worker can share what each of them reserves."""
        if self.offload and self.layout != "colocated":
            why = "the two sides share the model" if self.is_joint else "the two sides do not take turns"
            raise ValueError(
                f"cluster.offload needs cluster.layout colocated, got {self.layout}: in that layout {why}; leave it out"
            )
        if not self.is_colocated:
            return self
        rollout, learner = self.rollout, self.learner
        if self.rollout_actors != learner.workers:
            raise ValueError(
                f"cluster.layout {self.layout} needs a learner worker for each rollout actor, got"
                f" cluster.rollout_actors {self.rollout_actors} and cluster.learner.workers {learner.workers}:"
                " make them equal"
            )
        if self.is_joint:
            if (rollout.threads, rollout.gpus) != (learner.threads, learner.gpus):
                raise ValueError(
                    "cluster.layout joint needs equal threads and gpus under cluster.rollout and cluster.learner, got"
                    f" {rollout.threads}, {rollout.gpus:g} and {learner.threads}, {learner.gpus:g}: the two are one"
                    " process"
                )
            _require_whole(rollout.gpus + learner.gpus)
        elif rollout.gpus + learner.gpus > 1:
            raise ValueError(
                "cluster.layout colocated needs cluster.rollout.gpus and cluster.learner.gpus that add up to at most 1,"
                f" got {rollout.gpus:g} and {learner.gpus:g}: the two share one GPU; take 0.5 for each"
            )
        if not any(self.bundle_reserved.values()):
            raise ValueError(
                f"cluster.layout {self.layout} needs something to share, got no cpus, gpus or resources under"
                " cluster.rollout and cluster.learner: reserve some"
            )
        if rollout.labels != learner.labels or rollout.placement != learner.placement:
            raise ValueError(
                f"cluster.layout {self.layout} needs equal labels and placement under cluster.rollout and"
                f" cluster.learner, got {rollout.labels}, {rollout.placement} and {learner.labels},"
                f" {learner.placement}: the two share a node"
            )
        return self


def _require_whole(gpus: float) -> float:
    """Raise ValueError if Ray cannot reserve so many GPUs for one actor."""
    if gpus > 1 and gpus % 1:
        raise ValueError(f"GPUs of one actor must be a whole number above 1, got {gpus:g}: Ray divides only one GPU")
    return gpus


def require_divisor(workers: int, *, lanes: int) -> None:
    """Raise ValueError unless this many learner workers can share the lanes."""
    if lanes % workers:
        fitting = ", ".join(str(1 << power) for power in range(lanes.bit_length()))
        raise ValueError(
            f"cluster.learner.workers must divide learner.lanes {lanes}, got {workers}: every worker owns the same"
            f" number of lanes; take one of {fitting}"
        )


def cluster_address(config: ClusterConfig) -> str | None:
    """Return the address of the given cluster, `cluster.address` or RAY_ADDRESS; None if the run starts its own."""
    return config.address or os.environ.get("RAY_ADDRESS")
