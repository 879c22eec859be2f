"""The peak memory of each role, and whether a GPU is large enough, for `train --dry-run` and `doctor`.

`deploy.tools.estimate` gives the memory of a model's computation. This module adds the other memory of a process: its
libraries, copies of the adapter, trajectories and images. On a CPU all of it is host memory.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from deploy.tools.estimate import GIB, Estimate
from deploy.tools.measure import find_card
from protocol.config.cluster import cluster_address
from protocol.config.run import RunConfig
from protocol.errors import ConfigError

MIB = 2**20
GPUS_OF_A_NODE = 8
PROCESS = {
    "rollout actor": 530 * MIB,
    "learner worker": 530 * MIB,
    "reward actor": 110 * MIB,
    "driver": 300 * MIB,
    "object store": 0,
}
"""Bytes of a process with its libraries before it loads anything (Linux, CPU build of torch): the first two as
`python -m benchmarks.speed.memory` prints them, the others after their imports. A scorer may import torch too."""


@dataclass(frozen=True)
class RoleMemory:
    """The peak memory of one process."""

    role: str
    gpu: Mapping[str, int]
    """Bytes on a GPU by part; empty for a role without a GPU."""
    host: Mapping[str, int]
    """Bytes of host memory by part."""
    uncounted: str = ""
    """Part that is not counted."""

    count: int = 1
    """Processes of the role in a run."""

    @property
    def largest(self) -> tuple[str, int]:
        """The largest part besides libraries, of the GPU's memory if the role has one, and its bytes."""
        parts = self.gpu or {part: size for part, size in self.host.items() if part != "process"}
        return max(parts.items(), key=lambda part: part[1])


def nodes_of(config: RunConfig) -> int:
    """Return how many nodes of `GPUS_OF_A_NODE` GPUs a run needs."""
    return math.ceil(config.reserved.get("GPU", 0.0) / GPUS_OF_A_NODE) or 1


def roles_of(config: RunConfig, estimated: Estimate) -> list[RoleMemory]:
    """Add the memory that each process takes besides its model to an estimate.

    Returns:
        A rollout actor, a learner worker, with `cluster.offload` a node's copy of the weights of resting sides, an
        actor of each reward without its scorer's weights, the driver, and the object stores of all nodes together.
    """
    adapter, counts = 4 * estimated.trained, estimated.evaluations
    means = sum([config.is_forward, config.learner.average.decay > 0])
    state = {"adapters and optimizer": (3 + means) * adapter}
    rollout = {"adapters": (config.held_adapters + 1) * adapter, "images": estimated.images * estimated.image}
    learner = {**state, "trajectories": 2 * estimated.trajectories}
    driver = {**state, "older adapters": config.group.max_lag * adapter}
    cluster = config.cluster
    workers = cluster.learner.workers
    store = {
        "images": counts.images * estimated.image,
        "trajectories": config.group.shards * estimated.trajectories,
        "sums of gradients": (workers + nodes_of(config) * (workers > 1)) * adapter,
    }
    rewards = [
        RoleMemory(
            role=f"reward actor {name}",
            gpu={},
            host={"process": PROCESS["reward actor"], "images": 2 * reward.batch * estimated.image},
            uncounted="its scorer's model",
            count=reward.actors,
        )
        for name, reward in config.rewards.items()
    ]
    frozen = {part: estimated.rollout.get(part, 0) for part in ("transformer", "VAE", "tiny decoder")}
    resting = RoleMemory(role="resting weights", gpu={}, host=frozen, count=nodes_of(config))
    return [
        _role(
            "rollout actor", estimated.rollout, rollout, has_gpu=cluster.rollout.gpus > 0, count=cluster.rollout_actors
        ),
        _role("learner worker", estimated.learner, learner, has_gpu=cluster.learner.gpus > 0, count=workers),
        *([resting] if cluster.offload else []),
        *rewards,
        _role("driver", {}, driver, has_gpu=False),
        _role("object store", {}, store, has_gpu=False),
    ]


def _role(
    role: str, device: Mapping[str, int], host: Mapping[str, int], *, has_gpu: bool, count: int = 1
) -> RoleMemory:
    own = {"process": PROCESS[role], **host}
    if not has_gpu:
        own, device = {**own, **device}, {}
    return RoleMemory(role=role, gpu=device, host=own, count=count)


def fit_problems(config: RunConfig, estimated: Estimate, *, card: str | None = None) -> Iterator[ConfigError]:
    """Compare the GPU memory of the roles with a card's, or with this machine's GPUs if the run uses them.

    Args:
        card: name of the card of every GPU of the run; None compares with this machine.

    Yields:
        An error for each role that does not fit, with the keys that help.
    """
    import torch

    of_machine = [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]
    limit = min(of_machine, default=None) if not cluster_address(config.cluster) else None
    if card:
        limit = known.gb * 10**9 if (known := find_card(card)) else None
    if limit is None:
        return
    gpu = f"one {card}" if card else "a GPU of this machine"
    cluster = config.cluster
    share = cluster.rollout.gpus + cluster.learner.gpus
    bundles = max(1, int(1 / share)) if share else 1
    if cluster.is_colocated and bundles * estimated.shared > limit and cluster.learner.gpus:
        taking = "a rollout actor and a learner worker take"
        if bundles > 1:
            taking = f"{bundles} bundles of a rollout actor and a learner worker on one GPU take"
        yield ConfigError(
            f"{taking} about {bundles * estimated.shared / GIB:.1f} GiB together, but {gpu} has {limit / GIB:.1f}:"
            f" {cluster.memory_remedy.rpartition(': ')[2]}, or {_remedies(config, estimated.learner)}"
        )
    for role, share, parts in (
        ("rollout actor", cluster.rollout.gpus, estimated.rollout),
        ("learner worker", cluster.learner.gpus, estimated.learner),
    ):
        if not share or cluster.is_colocated:
            continue
        together = max(1, int(1 / share))
        if together * sum(parts.values()) > limit:
            taking = f"a {role} takes" if together == 1 else f"{together} {role}s on one GPU take"
            yield ConfigError(
                f"{taking} about {together * sum(parts.values()) / GIB:.1f} GiB, but {gpu} has {limit / GIB:.1f}:"
                f" {_remedies(config, parts)}"
            )


def _remedies(config: RunConfig, parts: Mapping[str, int]) -> str:
    """Name the config keys that make the largest parts smaller."""
    model, batch = config.model, "a lower model.forward_batch"
    if model.forward_batch is None:
        batch = "model.forward_batch=8"
    smaller = {None: "model.quantize=int8 or nf4", "int8": "model.quantize=nf4"}
    keys = {
        "forward and backward": batch if model.gradient_checkpointing else "model.gradient_checkpointing=true",
        "largest step": f"{batch} and model.decode_batch",
        "text encoders": "model.embedding_cache=FOLDER",
        "gradients of its lanes": "fewer learner.lanes or more cluster.learner.workers",
        "transformer": "model.dtype=bfloat16" if model.dtype == "float32" else smaller.get(model.quantize, ""),
    }
    by_size = sorted(parts, key=lambda part: -parts[part])
    helping = [keys[part] for part in by_size if parts[part] and keys.get(part)]
    return f"set {', '.join(helping[:3])}, or use a larger card"
