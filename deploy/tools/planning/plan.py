"""What a run needs and how long it takes: the tables of `train --dry-run`.

Seconds are counted operations at one rate. Scoring on the GPUs that make the images adds to an iteration; any other
scoring adds only what it takes longer than the images take. A whole iteration has a rest besides these parts.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.tools.estimate import GIB, Estimate, recounted
from deploy.tools.memory import GPUS_OF_A_NODE, MIB, RoleMemory, nodes_of, roles_of
from deploy.tools.planning.balance import balance_line, balance_of
from deploy.tools.planning.scoring import scoring_of
from protocol.config.run import RunConfig

REST = 0.07
"""Share of an iteration in which no part computes: publication, the driver, waiting. A run on one H100 spent 0.9 of its
12.7 s so (docs/performance.md)."""
SHOWN = {
    "object store": "object stores of all nodes",
    "resting weights": "resting weights of a node",
    "transformer": "transformer's weights",
    "text encoders": "text encoders' weights",
    "context": "CUDA itself",
    "largest step": "largest forward or decoding",
    "forward and backward": "forward and backward of a batch",
    "gradients of its lanes": "gradients",
    "adapters and optimizer": "adapters and optimizer",
}
"""The words that a table shows for a role or a part, where its name says too little."""


@dataclass(frozen=True)
class Plan:
    """How long a run takes, and what it takes on how many GPUs."""

    parts: Mapping[str, float]
    """Seconds of one iteration by part, `rest` included; sides that overlap are counted whole."""
    iteration: float
    """Seconds of one iteration."""
    evaluation: float
    """Seconds of one evaluation."""
    evaluations: int
    """Evaluations of the run, with the first and the last."""
    iterations: int
    gpus: int
    unknown: tuple[str, ...] = ()
    """Rewards whose seconds are not known."""

    @property
    def wall(self) -> float:
        """Seconds of the whole run."""
        return self.iterations * self.iteration + self.evaluations * self.evaluation

    @property
    def gpu_hours(self) -> float:
        return self.gpus * self.wall / 3600


def plan_of(config: RunConfig, estimated: Estimate, *, heldout: int, tflops: float) -> Plan:
    """Compute how long a run takes.

    Args:
        estimated: of the same config.
        heldout: number of held-out prompts.
        tflops: rate of one GPU in forwards, gradients and decoding, in 10^12 operations per second.
    """
    counts, cluster, now, rate = (
        estimated.evaluations,
        config.cluster,
        balance_of(config, estimated.evaluations),
        tflops * 1e12,
    )
    scoring = scoring_of(config, estimated, tflops=tflops)
    parts = {
        "rollout": now.rollout * counts.forward_flops / rate,
        "decoding": counts.decoding_flops / rate / cluster.rollout_actors,
    }
    makes = sum(parts.values())
    shares = {name: config.rewards[name].reserved(cluster.reward).get("GPU", 0.0) > 0 for name in scoring}
    adds = sum(seconds or 0.0 for name, seconds in scoring.items() if shares[name] and cluster.is_colocated)
    slowest = max((seconds or 0.0 for seconds in scoring.values()), default=0.0)
    parts["scoring"] = max(adds, slowest - makes)
    makes += parts["scoring"]
    parts["update"] = now.update * counts.forward_flops / rate
    computed = max(makes, parts["update"]) if now.overlaps else makes + parts["update"]
    iteration = computed / (1 - REST)
    parts["rest"] = iteration - computed
    every = config.evaluation.every or config.iterations
    images = heldout * config.evaluation.images_per_prompt
    return Plan(
        parts=parts,
        iteration=iteration,
        evaluation=images * estimated.evaluation_flops / rate / cluster.rollout_actors / (1 - REST),
        evaluations=1 + math.ceil(config.iterations / every),
        iterations=config.iterations,
        gpus=math.ceil(config.reserved.get("GPU", 0.0)),
        unknown=tuple(name for name, seconds in scoring.items() if seconds is None),
    )


def plan_lines(
    config: RunConfig, estimated: Estimate, *, prompts: int, heldout: int, tflops: float | None = None
) -> Iterator[str]:
    """Describe what a run computes, needs and takes; without `tflops` (see `plan_of`) there are no seconds."""
    yield from estimated.lines()
    yield balance_line(config, estimated.evaluations)
    yield ""
    yield from memory_lines(config, estimated)
    yield from disk_lines(config, estimated, prompts=prompts, heldout=heldout)
    if tflops:
        yield ""
        yield from time_lines(config, plan_of(config, estimated, heldout=heldout, tflops=tflops), tflops=tflops)


def memory_lines(config: RunConfig, estimated: Estimate) -> Iterator[str]:
    """Show the peak memory of each role and of a node as a table."""
    roles = roles_of(config, estimated)
    rows = [("peak memory", "count", "GPU each", "host each", "its largest part")]
    for each in roles:
        part, size = each.largest
        rows.append(
            (
                SHOWN.get(each.role, each.role),
                f"{each.count}",
                size_text(sum(each.gpu.values())) if each.gpu else "",
                size_text(sum(each.host.values())),
                f"{SHOWN.get(part, part)}, {size_text(size)}"
                + (f"; {each.uncounted} comes on top" * bool(each.uncounted)),
            )
        )
    if estimated.shared:
        rows.append(("a GPU with both sides", f"{config.cluster.rollout_actors}", size_text(estimated.shared), "", ""))
    nodes, host = node_needs(config, roles)
    rows.append(
        ("a node", f"{nodes}", "", size_text(host), f"with at most {GPUS_OF_A_NODE} GPUs, the driver beside them")
    )
    yield from aligned(rows, words=(0, 4))


def node_needs(config: RunConfig, roles: Sequence[RoleMemory]) -> tuple[int, int]:
    """Return how many nodes of `GPUS_OF_A_NODE` GPUs a run needs, and the peak of host memory on the driver's node."""
    nodes = nodes_of(config)
    host = 0
    for each in roles:
        size = sum(each.host.values())
        host += math.ceil(size / nodes) if each.role == "object store" else math.ceil(each.count / nodes) * size
    return nodes, host


def disk_lines(config: RunConfig, estimated: Estimate, *, prompts: int, heldout: int) -> Iterator[str]:
    """Describe what a run writes to disks besides its images and logs."""
    means = sum([config.is_forward, config.learner.average.decay > 0])
    kept = config.checkpoint.keep + 1 + bool(config.watched_rewards)
    each = 4 * estimated.trained * (3 + means)
    yield f"disk, run folder: {kept} checkpoints of {size_text(each)} take {size_text(kept * each)}"
    if config.model.embedding_cache:
        drawn = min(prompts, config.iterations * config.group.per_iteration)
        yield (
            f"disk, model.embedding_cache: {drawn + heldout:,} prompts of at most {size_text(estimated.embedding)} take"
            f" at most {size_text((drawn + heldout) * estimated.embedding)}"
        )


def time_lines(config: RunConfig, plan: Plan, *, tflops: float) -> Iterator[str]:
    """Show the seconds of an iteration by part and what the whole run takes."""
    rows = [(f"one iteration at {tflops:.3g} TFLOP/s a GPU", "")]
    times = {**{f"  {part}": seconds for part, seconds in plan.parts.items()}, "  in all": plan.iteration}
    times[f"one of {plan.evaluations} evaluations"] = plan.evaluation
    yield from aligned([*rows, *((name, f"{seconds:,.1f} s") for name, seconds in times.items())])
    for name in plan.unknown:
        yield f"note: the scorer of rewards.{name} is not in the table of scorers, so its seconds are not counted"
    images = config.iterations * config.group.per_iteration * config.group.size
    hours = f", {plan.gpu_hours:,.0f} GPU-hours on {plan.gpus} GPUs" if plan.gpus else ""
    yield f"the run: {plan.iterations:,} iterations, {images:,} images to learn from, {time_text(plan.wall)}{hours}"


def method_lines(
    config: RunConfig, estimated: Estimate, others: Mapping[str, RunConfig], *, heldout: int, tflops: float
) -> Iterator[str]:
    """Compare a run's cost with the cost of other methods at the same scale.

    Args:
        others: the config with another method, by the method's name.
    """
    rows = [("the run by other methods", "images scored", "an iteration", "GPU-hours")]
    for name, other in {"as configured": config, **others}.items():
        counted = estimated if other is config else recounted(other, estimated)
        plan = plan_of(other, counted, heldout=heldout, tflops=tflops)
        scored, hours = f"{counted.evaluations.images:,}", f"{plan.gpu_hours:,.0f}"
        rows.append((f"  {name}", scored, f"{plan.iteration:,.1f} s", hours))
    yield from aligned(rows)


def difference_lines(config: RunConfig, name: str, other: RunConfig) -> Iterator[str]:
    """List the keys that another method changes in a config."""
    mine, theirs = config.flat_fields(), other.flat_fields()
    rows = [("key", "here", f"with method={name}")]
    rows += [
        (key, *("none" if value is None else str(value) for value in (mine.get(key), theirs.get(key))))
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
    yield from aligned(rows, words=(0, 1, 2))


def aligned(rows: Iterable[Sequence[str]], *, words: Collection[int] = (0,)) -> Iterator[str]:
    """Write rows of cells as lines; the columns in `words` are aligned to the left, columns of numbers to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index in words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def size_text(size: int) -> str:
    """Write bytes in GiB, less than a tenth of it in MiB."""
    if size >= 100 * GIB:
        return f"{size / GIB:,.0f} GiB"
    if size >= GIB / 10:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.0f} MiB" if size >= 10 * MIB else f"{size / MIB:.2g} MiB"


def time_text(seconds: float) -> str:
    """Write a duration in the unit that a person would take."""
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 0.1 or not seconds else f"{seconds:.1g} s"
