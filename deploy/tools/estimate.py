"""Estimates the cost of an iteration: velocity evaluations, images, memory of rollout actor and learner.

Evaluations are counted by running the real sampler on a stand-in for the model; memory by running the transformer's
forward and backward and the VAE with shapes only (`deploy.tools.fake_memory`). Neither needs weights or a GPU.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deploy.tools.fake_memory import CostMeter, stored
from flow.fused import keep_as_on_gpu
from flow.models.contract import EMBEDS, Conditioning
from flow.models.embeddings import KEPT_PROMPTS
from flow.models.hollow import attach_hollow_adapter, hollow_backbone, hollow_encoders
from flow.models.located import adapter_config
from flow.models.pipeline import PipelineBackbone
from flow.models.reading import dtype_of
from flow.policy import FlowPolicy, policy_of
from flow.rollout import rollout_shard
from learner.credit.step_weights import step_weights
from protocol.config.model import LoraConfig
from protocol.config.run import RunConfig
from protocol.messages import ConditionImage, Prompt, ShardRequest

GIB = 2**30
CONTEXT = int(0.8 * GIB)
"""Bytes of GPU memory that a process takes before its first tensor, with the libraries' workspaces: a rough guess."""

KEPT = ("context", "text encoders", "prompt embeddings", "optimizer", "adapter old", "running mean")
"""Kinds of memory that stay on the GPU with `cluster.offload`."""
ONCE = ("context", "transformer", "VAE", "tiny decoder", "text encoders")
"""Kinds of memory that one process has once, for both sides."""
OF_BLOCKS = (
    "transformer",
    "adapter",
    "optimizer",
    "adapter old",
    "running mean",
    "state before the update",
    "gradients of its lanes",
)
"""Kinds of memory that several GPUs of an actor share about equally."""
SMALL = 64
"""Numbers in a latent of the stand-in for the model."""


@dataclass(frozen=True)
class IterationCounts:
    """Counts of one iteration; an evaluation is one pass of one row through the transformer, so guidance needs two."""

    trajectories: int
    rollout: int
    """Evaluations that roll out the trajectories and complete their points."""
    images: int
    """Images that are decoded and scored."""
    pairs: int
    """Most (trajectory, step) pairs that the learner trains."""
    learner: int
    """Cost of their gradients as a number of evaluations; pairs with the same state share one. The reference of a KL
    term and the adapter `old` add one each; `dgpo` adds another one for its weight."""
    gradient_rows: int
    """Rows of the learner's largest forward and backward."""
    forward_flops: float
    """Operations of one evaluation."""
    gradient_flops: float
    """Operations of one evaluation and its backward."""
    image_flops: float = 0.0
    """Operations of the VAE for one image; 0 if decoding was not counted."""
    point_flops: float = 0.0
    """Operations to decode a completed point, by the tiny decoder if there is one."""
    decoding_flops: float = 0.0
    """Operations for all decoded images, a tiny decoder's included."""


@dataclass(frozen=True)
class Estimate:
    """The estimate that `train --dry-run` shows."""

    evaluations: IterationCounts
    rollout: Mapping[str, int]
    """Memory of a rollout actor in bytes, by part."""
    learner: Mapping[str, int]
    """Memory of a learner worker in bytes, by part."""
    trained: int
    """Numbers in the adapter."""
    shared: int = 0
    """Bytes that a rollout actor and a learner worker take together on one GPU; 0 if they do not share one."""
    image: int = 0
    """Bytes of one decoded image."""
    images: int = 0
    """Most images of a shard."""
    trajectories: int = 0
    """Bytes of a shard's trajectories when they are sent."""
    embedding: int = 0
    """Most bytes of one prompt's embeddings."""
    evaluation_flops: float = 0.0
    """Operations for one image of an evaluation, with its decoding."""
    backbone: PipelineBackbone | None = field(default=None, compare=False, repr=False)
    """The model without weights that was estimated; `recounted` needs its schedule."""

    def lines(self) -> Iterator[str]:
        counts = self.evaluations
        yield (
            f"an iteration rolls out {counts.trajectories:,} trajectories and scores {counts.images:,} images; for this"
            f" the transformer makes {counts.rollout:,} forwards (a forward: one latent goes through it once)"
        )
        yield (
            f"then the learner trains on at most {counts.pairs:,} denoising steps of these trajectories; this costs as"
            f" much as {counts.learner:,} forwards"
        )
        yield f"the adapter (LoRA) has {self.trained / 1e6:.2f} million numbers to train"


def estimate(config: RunConfig, *, prompts: int = KEPT_PROMPTS, conditions: int = 0) -> Estimate:
    """Estimate the cost of a config; only the config files of its model are read.

    Args:
        prompts: number of prompts of the run; each model process keeps embeddings of at most `KEPT_PROMPTS` of them.
        conditions: most condition images of a prompt, if more than the model needs; they count as squares.

    Returns:
        Counts, and memory in bytes.

    Raises:
        ModelError: there is no such model.
        ConfigError: the sampling section leaves no stochastic step, or every trained step has weight 0.
    """
    fake = FakeTensorMode()
    backbone = hollow_backbone(config.model, within=fake)
    backbone.example_conditions = max(conditions, backbone.example_conditions)
    with fake:
        encoders = [] if config.model.embedding_cache else list(hollow_encoders(config.model))
    return estimate_of(config, backbone, encoders, adapter_config(config.model), fake=fake, prompts=prompts)


def estimate_of(
    config: RunConfig,
    backbone: PipelineBackbone,
    encoders: Iterable[nn.Module],
    adapter: LoraConfig,
    *,
    fake: FakeTensorMode,
    prompts: int = KEPT_PROMPTS,
) -> Estimate:
    """Estimate the cost of a config with a model whose components were made under `fake`.

    Args:
        backbone: the model without an adapter; this function attaches one.
        encoders: text encoders of the model; none with an embedding cache.
        adapter: rank, alpha and targets of the adapter.
        fake: the mode in which tensors have shapes but no memory.
        prompts: see `estimate`.

    Returns:
        Counts, and memory in bytes.
    """
    trained = attach_hollow_adapter(backbone.transformer, adapter, within=fake)
    if config.cluster.learner.gpus:
        keep_as_on_gpu(backbone.transformer)
    shard = count_shard(config, backbone)
    most = config.model.forward_batch or shard.largest_forward
    learnt = config.learner.batch or most
    rows = config.model.rows
    with fake:
        embedding = sum(each.numel() for each in backbone.example(1).tensors.values()) * dtype_of(config.model).itemsize
        forward = pass_cost(backbone, rows * min(most, shard.largest_forward), has_gradient=False)
        backward = pass_cost(backbone, rows * min(learnt, shard.gradient_rows), has_gradient=True)
        decoding = _decoding_cost(config, backbone, shard.largest_decoding)
        tiny = [_decoding_cost(config, backbone, images, is_tiny=True) for images in [shard.largest_points] if images]
        shown = _evaluation_costs(config, backbone, shard, (forward, decoding))
    counts = count_evaluations(
        config,
        shard,
        forward=forward.flops,
        gradient=backward.flops / forward.flops,
        image=decoding.flops,
        point=tiny[0].flops if tiny else decoding.flops,
    )
    static = {
        "transformer": _bytes(p for p in backbone.transformer.parameters() if not p.requires_grad),
        "VAE": _bytes(backbone.vae.parameters()),
        **({"tiny decoder": _bytes(backbone.tiny_decoder.parameters())} if backbone.tiny_decoder else {}),
        "text encoders": sum(_bytes(encoder.parameters()) for encoder in encoders),
        "prompt embeddings": embedding * min(prompts, KEPT_PROMPTS),
        "adapter": 4 * trained,
    }
    apart = rows * min(most, shard.largest_forward) * embedding * (rows - 1)  # both branches besides their joint rows
    rollout = {
        **static,
        **({"context": CONTEXT} if config.cluster.rollout.gpus else {}),
        "largest step": max(
            forward.peak + apart + shard.held_forward,
            *(each.peak + shard.held_decoding for each in (decoding, *tiny)),
            *(each.peak for each in shown),
        ),
    }
    means = sum([config.is_forward, config.learner.average.decay > 0])
    learner = {
        **static,
        **({"context": CONTEXT} if config.cluster.learner.gpus else {}),
        "optimizer": 8 * trained,
        **({"adapter old": 4 * trained} if config.is_forward else {}),
        **({"running mean": 4 * trained} if config.learner.average.decay else {}),
        **({"state before the update": (2 + means) * 4 * trained} if config.cluster.learner.gpus else {}),
        "gradients of its lanes": 4 * trained * lanes_of_a_worker(config),
        "forward and backward": backward.peak + _beside_one_state(backbone, config, shard),
    }
    cluster = config.cluster
    joint = cluster.joint_role.gpus if cluster.is_joint else 0.0
    rollout = first_gpu_memory(rollout, joint or cluster.rollout.gpus)
    learner = first_gpu_memory(learner, joint or cluster.learner.gpus)
    shared = 0
    if cluster.is_joint:
        learner = {part: size for part, size in learner.items() if part not in ONCE}
        shared = joint_memory(rollout, learner)
    elif cluster.is_colocated:
        shared = bundle_memory(rollout, learner, offload=cluster.offload)
    return Estimate(
        evaluations=counts,
        rollout=rollout,
        learner=learner,
        trained=trained,
        shared=shared,
        image=decoding.numbers,
        images=shard.images,
        trajectories=shard.trajectories,
        embedding=embedding,
        backbone=backbone,
        evaluation_flops=config.evaluation.steps * rows * shown[0].flops + shown[1].flops,
    )


def recounted(config: RunConfig, estimated: Estimate) -> Estimate:
    """Count the evaluations of another config of the same model and image size; its memory is not estimated.

    Args:
        estimated: estimate of the first config, by `estimate`.

    Returns:
        The first estimate with the other config's counts.
    """
    assert estimated.backbone is not None
    counts = estimated.evaluations
    gradient = counts.gradient_flops / counts.forward_flops
    shard = count_shard(config, estimated.backbone)
    again = count_evaluations(
        config,
        shard,
        forward=counts.forward_flops,
        gradient=gradient,
        image=counts.image_flops,
        point=counts.point_flops,
    )
    return replace(estimated, evaluations=again)


def bundle_memory(rollout: Mapping[str, int], learner: Mapping[str, int], *, offload: bool) -> int:
    """Compute the peak memory of a rollout actor and a learner worker together on one GPU.

    Args:
        rollout: bytes of the rollout actor by part.
        learner: bytes of the learner worker by part.
        offload: whether the waiting side releases all parts but `KEPT`; otherwise torch keeps all its memory.

    Returns:
        Bytes.
    """
    whole = [sum(side.values()) for side in (rollout, learner)]
    if not offload:
        return sum(whole)
    resting = [sum(side.get(part, 0) for part in KEPT) for side in (rollout, learner)]
    return max(whole[0] + resting[1], whole[1] + resting[0])


def first_gpu_memory(parts: Mapping[str, int], gpus: float) -> dict[str, int]:
    """Return the most memory of the first of several GPUs: its share of what lies in the blocks, and all else.

    Args:
        parts: bytes of an actor by part.
        gpus: of the actor; up to 1 it has one.
    """
    return {part: size // max(1, int(gpus)) if part in OF_BLOCKS else size for part, size in parts.items()}


def joint_memory(rollout: Mapping[str, int], learner: Mapping[str, int]) -> int:
    """Compute the peak memory of one process that rolls out and learns, in turns: each uses what the other has left.

    Args:
        rollout: bytes of its rollouts by part, with the frozen model.
        learner: bytes of its learning by part, without `ONCE`.
    """
    steps = rollout["largest step"], learner["forward and backward"]
    return sum(rollout.values()) + sum(learner.values()) - min(steps)


@dataclass(frozen=True)
class ShardCounts:
    """The work of the sampler and of the learner for a shard."""

    rows: float
    """Rows through the transformer in a group's first shard; the mean of groups with different windows."""
    images: int
    """Images that the first shard decodes."""
    later_rows: float
    """Rows of each later shard (it reuses the first shard's shared point), averaged over windows."""
    later_images: int
    """Images that each later shard decodes."""
    pairs: tuple[int, ...]
    """Pairs of the shard at each stochastic step: its members, or its branches in a tree."""
    states: tuple[int, ...]
    """Number of different states of the shard's members before each stochastic step; each needs one gradient."""
    gradient_rows: int
    """Rows of the largest forward and backward of a shard in any iteration."""
    largest_forward: int
    """Rows of the largest forward of a rollout actor, not counting the second branch of guidance."""
    largest_decoding: int
    """Most images that the VAE decodes together."""
    largest_points: int = 0
    """Most images that the tiny decoder decodes together."""
    held_forward: int = 0
    """Bytes of the sampler's own tensors during its largest forward."""
    held_decoding: int = 0
    """Bytes of the sampler's own tensors during decoding."""
    trajectories: int = 0
    """Bytes of the first shard's trajectories when they are sent."""


def _beside_one_state(backbone: PipelineBackbone, config: RunConfig, shard: ShardCounts) -> int:
    """Return the bytes of a micro-batch's own tensors if its pairs share one state, so that its forward has one row.

    These are states, next states, means, their difference from a sample and its square, and three gradients.
    """
    return 8 * 4 * config.group.shard * math.prod(backbone.latent_shape) if shard.gradient_rows == 1 else 0


def count_shard(config: RunConfig, backbone: PipelineBackbone) -> ShardCounts:
    """Run a first and a later shard of each window on a stand-in that counts; `backbone` gives its schedule."""
    counter = CountingBackbone(backbone)
    policy: FlowPolicy = policy_of(counter, config)
    weights = config.credit.step_weights
    step_weights(weights, total=policy.total_steps, stds=policy.stds, trained=policy.trained)  # a run refuses them too
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text=""),
        first_member=0,
        members=config.group.shard,
        adapter_version=0,
        adapter_digest="",
    )
    requests = [replace(request, group=group) for group in range(policy.window_period)]
    with CostMeter() as counter.meter:
        first = [rollout_shard(policy, each, config) for each in requests]
    rollout, images = first[0]
    made, decoded, points = policy.evaluations, counter.decoded, counter.points
    scale = math.prod(backbone.latent_shape) / math.prod(counter.latent_shape)
    arrays = (rollout.latents, rollout.means)
    # The shards of a group differ only if each explores another step.
    others = range(1, config.group.size // config.group.shard if config.sampling.window.rule == "branch" else 2)
    starts = [shard * config.group.shard for shard in others] or [config.group.shard]
    later = [rollout_shard(policy, replace(each, first_member=start), config) for each in requests for start in starts]
    is_shared = config.sampling.shared_noise and not config.is_forward
    counted = list(_pairs_and_states(config, policy, rollout.steps))
    return ShardCounts(
        rows=made / len(requests),
        images=len(images),
        later_rows=(policy.evaluations - made) / len(later),
        later_images=len(later[0][1]),
        pairs=tuple(pairs for pairs, _ in counted),
        states=tuple(states for _, states in counted),
        gradient_rows=1 if is_shared and policy.most_steps == 1 else config.group.shard,
        largest_forward=counter.largest // config.model.rows,
        largest_decoding=decoded,
        largest_points=points,
        held_forward=round(scale * counter.held_forward),
        held_decoding=round(scale * counter.held_decoding),
        trajectories=round(scale * sum(array.nbytes for array in arrays if array is not None)),
    )


def _pairs_and_states(config: RunConfig, policy: FlowPolicy, explored: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Count a shard's pairs at each stochastic step, and the different states that the learner evaluates for them."""
    strides = policy.strides(explored)
    for k in explored:
        rows = math.ceil(config.group.shard / strides.get(k, 1))
        yield rows, rows if config.is_forward else math.ceil(rows / policy.rows_per_state(k, explored, rows))


def count_evaluations(
    config: RunConfig, shard: ShardCounts, *, forward: float, gradient: float, image: float = 0.0, point: float = 0.0
) -> IterationCounts:
    """Compute the counts of an iteration from a shard's.

    Args:
        shard: counts from `count_shard`.
        forward: operations of one evaluation, from `pass_cost`.
        gradient: cost of the forward and backward of one pair as a number of forwards, from `pass_cost`.
        image: operations to decode a finished image.
        point: operations to decode a completed point.

    Returns:
        The counts of one iteration.
    """
    groups, shards = config.group.per_iteration, config.group.shards
    trained = max(1, math.floor(config.learner.step_fraction * len(shard.states)))
    pairs, states = (
        config.learner.epochs * shards * sum(sorted(counts)[-trained:]) for counts in (shard.pairs, shard.states)
    )
    learner = config.learner
    compares_old = config.is_forward and (learner.objective != "awm" or learner.old.weight > 0)
    others = compares_old + learner.needs_reference
    # `dgpo` runs all of them once more, without a gradient, for the group's weight.
    each = gradient + others + (1 + others if learner.objective == "dgpo" else 0)
    trajectories = shards * config.group.shard
    images = groups * shard.images + (shards - groups) * shard.later_images
    points = images - trajectories if config.scores_points else 0
    return IterationCounts(
        trajectories=trajectories,
        rollout=round(groups * shard.rows + (shards - groups) * shard.later_rows),
        images=images,
        pairs=pairs,
        learner=round(states * config.model.rows * each),
        gradient_rows=min(learner.batch or config.model.forward_batch or shard.gradient_rows, shard.gradient_rows),
        forward_flops=forward,
        gradient_flops=forward * gradient,
        image_flops=image,
        point_flops=point,
        decoding_flops=(images - points) * image + points * point,
    )


class CountingBackbone:
    """A backbone with small latents that predicts zeros and records the sizes of its largest calls.

    `meter` measures the sampler's own tensors at this small size; they grow in proportion to the latents.
    """

    latent_shape: tuple[int, int, int] = (1, 1, SMALL)
    decoded_again = 0

    def __init__(self, backbone: PipelineBackbone) -> None:
        self.transformer: nn.Module = nn.Linear(1, 1)
        self.largest = 0
        self.decoded = self.points = 0
        self.meter = CostMeter()
        self.held_forward = self.held_decoding = 0
        self._backbone = backbone

    def sigmas(self, steps: int) -> Float[Tensor, " points"]:
        return self._backbone.sigmas(steps)

    def sized(self, height: int, width: int) -> "CountingBackbone":
        """Return this stand-in: its latents have one size."""
        del height, width
        return self

    def encode(self, text: str, conditions: tuple[ConditionImage, ...] = ()) -> Conditioning:
        del text, conditions
        return Conditioning.of({EMBEDS: torch.zeros(1, 0, 0)})

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: Conditioning
    ) -> Float[Tensor, "B C H W"]:
        """Return zeros, and record the number of rows."""
        del sigma, conditioning
        if len(latents) >= self.largest:
            self.largest = len(latents)
            self.held_forward = max(self.held_forward, self.meter.current)
        return torch.zeros_like(latents)

    def guide(
        self, without: Float[Tensor, "B C H W"], toward: Float[Tensor, "B C H W"], weight: float
    ) -> Float[Tensor, "B C H W"]:
        """Return the first branch, which is zeros."""
        del toward, weight
        return without

    def decode(self, latents: Float[Tensor, "B C H W"], *, points: int = 0) -> UInt8[np.ndarray, "B height width 3"]:
        """Return black images of one pixel, and record how many the VAE and how many the tiny decoder would decode."""
        tiny = points if self._backbone.tiny_decoder else 0
        self.decoded, self.points = max(self.decoded, len(latents) - tiny), max(self.points, tiny)
        self.held_decoding = max(self.held_decoding, self.meter.current)
        return np.zeros((len(latents), 1, 1, 3), np.uint8)

    def rest(self) -> None: ...

    def wake(self) -> None: ...


def lanes_of_a_worker(config: RunConfig) -> int:
    """Count the lanes of the first learner worker that get a shard in an optimizer step."""
    shards = config.group.shards // config.learner.updates_per_iteration
    return math.ceil(min(config.learner.lanes, shards) / config.cluster.learner.workers)


@dataclass(frozen=True)
class PassCost:
    """The cost of one pass through the transformer, or of one decoding."""

    peak: int
    """Peak of the memory in bytes, without the weights."""
    flops: float
    """Operations of one row, or of one image."""
    numbers: int = 0
    """Numbers of one decoded image."""


def pass_of(backbone: PipelineBackbone, rows: int, *, has_gradient: bool, device: str = "cpu") -> Callable[[], None]:
    """Prepare one forward, or one forward with its backward.

    Args:
        backbone: the model, with its adapter.
        rows: number of rows of the forward.
        has_gradient: whether a backward of the mean square follows.

    Returns:
        A function that computes it on each call.
    """
    latents = torch.randn(rows, *backbone.latent_shape, device=device)  # a GPU multiplies zeros faster
    conditioning, sigma = backbone.example(rows), torch.full((rows,), 0.5, device=device)

    def work() -> None:
        with torch.set_grad_enabled(has_gradient):
            velocity = backbone.velocity(latents, sigma, conditioning)
            if has_gradient:
                velocity.square().mean().backward()

    return work


def pass_cost(backbone: PipelineBackbone, rows: int, *, has_gradient: bool) -> PassCost:
    """Count memory and operations of one forward, or of one forward with its backward.

    The frozen weights get no gradients, so forward and backward of a LoRA cost about 2 forwards, and about 3 with
    checkpointing.

    Args:
        backbone: the model, with its adapter.
        rows: number of rows of the forward; guidance needs two per sample.
        has_gradient: whether to count the backward of the mean square too.

    Returns:
        Memory of the whole pass, operations of one row.
    """
    with CostMeter(apart=backbone.transformer.parameters()) as meter:
        pass_of(backbone, rows, has_gradient=has_gradient)()
    backbone.transformer.zero_grad(set_to_none=True)
    return PassCost(peak=meter.peak, flops=meter.flops / rows)


def _evaluation_costs(
    config: RunConfig, backbone: PipelineBackbone, shard: ShardCounts, training: tuple[PassCost, PassCost]
) -> tuple[PassCost, PassCost]:
    """Return the costs of a forward and of a decoding in an evaluation; `training`'s if it is no larger."""
    batch, model = config.evaluation.batch, config.model
    rows, images = min(model.forward_batch or batch, batch), min(model.decode_batch or batch, batch)
    if not config.evaluation.size and rows <= shard.largest_forward and images <= shard.largest_decoding:
        return training
    sized = backbone.sized(*config.evaluation.size) if config.evaluation.size else backbone
    forward = pass_cost(sized, model.rows * rows, has_gradient=False)
    return forward, _decoding_cost(config, sized, images)


@torch.no_grad()
def _decoding_cost(config: RunConfig, backbone: PipelineBackbone, images: int, *, is_tiny: bool = False) -> PassCost:
    images = min(config.model.decode_batch or images, images)
    vae = backbone.tiny_decoder if is_tiny else backbone.vae
    latents = torch.zeros(images, *backbone.latent_shape, dtype=vae.dtype)
    with CostMeter(apart=vae.parameters(), is_cpu=not config.cluster.rollout.gpus) as memory:
        pixels = backbone.tiny_pixels(latents) if is_tiny else backbone.pixels(latents)
    return PassCost(peak=memory.peak, flops=memory.flops / images, numbers=pixels.numel() // images)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in stored(tensors))
