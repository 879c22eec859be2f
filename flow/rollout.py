"""The work of a rollout actor: a shard's trajectories with their completed points, and plain ODE images.

request -> initial noise -> T transitions, velocities kept -> completions of the points in one batch -> images

Both run in torch's inference mode, which has a little less overhead for each operation than `no_grad`. Its tensors can
never be part of a gradient, so the results are numpy arrays.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from flow.adapter.lora import Lora
from flow.maths.completion import complete, granular_grid, stack_grids, substep_grid
from flow.maths.noise import INITIAL, SHARED, normal, trajectory_noise
from flow.maths.transition import Start, Transition, clean_estimate, ode
from flow.meter import Meter
from flow.models.contract import Conditioning, stack
from flow.models.load import FrozenModel
from flow.policy import FlowPolicy, build_policy, start_adapter
from protocol.config.run import RunConfig
from protocol.errors import ContractError, NonFiniteError, StaleAdapterError
from protocol.messages import (
    COMMON_IMAGE,
    NO_IMAGE,
    Adapter,
    Excerpt,
    GenerateRequest,
    Receipt,
    Rollout,
    ShardReceipt,
    ShardRequest,
    digest_of,
)

log = logging.getLogger(__name__)


class RolloutPolicy:
    """Rolls out with exactly the adapter that a request names, or refuses.

    It keeps the newest `held_adapters` adapters, since a request may be some updates old or name a running mean.

        rollout_policy = RolloutPolicy(config)
        version, digest = rollout_policy.receive(adapter)
        receipt, rollout, images = rollout_policy.rollout(request)
    """

    def __init__(self, config: RunConfig, *, device: str = "cpu", frozen: FrozenModel | None = None) -> None:
        """
        Args:
            frozen: see `build_policy`.
        """
        self._config = config
        self._policy, self._lora = build_policy(config, device=device, frozen=frozen)
        self._meter = Meter(device)
        self._versions: OrderedDict[tuple[int, str], Adapter] = OrderedDict()
        self._active: tuple[int, str] | None = None
        self._receiving = Lock()
        self._rests = False

    def receive(self, adapter: Adapter) -> tuple[int, str]:
        """Keep an adapter for the requests that name it; return its version and the digest of the received arrays.

        Another thread may call this while a shard is rolled out: the transformer changes only between two requests.
        """
        held = adapter.version, digest_of(adapter.arrays)
        with self._receiving:
            self._versions[held] = adapter
            self._versions.move_to_end(held)
            while len(self._versions) > self._config.held_adapters:
                self._versions.popitem(last=False)
        return held

    def rollout(self, request: ShardRequest) -> tuple[ShardReceipt, Rollout, UInt8[np.ndarray, "I height width 3"]]:
        """Roll out one shard with the requested adapter: receipt, trajectories, images."""
        held = self._activate(request.adapter_version, request.adapter_digest)
        self._meter.read()  # drops the work of a shard that failed
        rollout, images = rollout_shard(self._policy, request, self._config, self._meter)
        receipt = ShardReceipt(
            adapter_version=held[0],
            adapter_digest=held[1],
            images=len(images),
            facts=rollout.facts(),
            work=self._meter.read(),
        )
        return receipt, rollout, images

    def generate(self, request: GenerateRequest) -> tuple[Receipt, UInt8[np.ndarray, "B height width 3"]]:
        """Make ODE images with the requested adapter: receipt, images."""
        held = self._activate(request.adapter_version, request.adapter_digest)
        images = generate(self._policy, request, self._lora)
        return Receipt(adapter_version=held[0], adapter_digest=held[1], images=len(images)), images

    def first_adapter(self) -> Adapter:
        """Copy the adapter of iteration 0: `model.lora.start`, or an adapter that leaves the model as it is.

        Raises:
            ContractError: a request has loaded another adapter.
        """
        if self._active is not None:
            raise ContractError(f"the first adapter can be copied before any request, got version {self._active[0]}")
        start_adapter(self._lora, self._config)
        return self._lora.export(version=0)

    def rest(self) -> None:
        """Keep the model in host memory until the next request."""
        self._policy.backbone.rest()
        self._rests = True

    def _activate(self, version: int, digest: str) -> tuple[int, str]:
        """Make the transformer hold the requested adapter; return its version and digest."""
        if self._rests:
            self._policy.backbone.wake()
            self._rests = False
        if self._active is not None and self._active == (version, digest):
            return self._active
        adapter = self._versions.get((version, digest))
        if adapter is None:
            raise StaleAdapterError(
                f"a request for version {version} with digest {digest} cannot be met, holding versions"
                f" {[(held, own[:8]) for held, own in self._versions]}"
            )
        self._active = (version, self._lora.load(adapter))
        return self._active


@dataclass(frozen=True)
class Step:
    """One step of a trajectory as it was taken."""

    k: int
    span: int
    """Steps of the schedule that it crosses; above 1 for a merged step."""
    latents: Float[Tensor, "N C H W"]
    velocity: Float[Tensor, "N C H W"]
    transition: Transition
    next_latents: Float[Tensor, "N C H W"]


def trajectory(
    policy: FlowPolicy,
    *,
    initial: Float[Tensor, "N C H W"],
    conditioning: tuple[Conditioning, ...],
    noise: Callable[[int], Float[Tensor, "N C H W"]],
    stochastic: Sequence[int],
    until: int | None = None,
) -> Iterator[Step]:
    """Take the T steps from `initial`, or only the steps before point `until`.

    Args:
        initial: a row for each member, or one row that all share: then the steps have one row up to the first
            stochastic step, where it splits into the members. Rows that split share one velocity.
        conditioning: from `policy.conditioning`.
        noise: returns standard normal noise [N, C, H, W] of step k; called for the stochastic steps only. If it has
            more rows than the state, the state splits there: a single row into all, or each row into two.
        stochastic: the steps k that are stochastic; all others are ODE steps.
        until: the point at which to end; T by default.
    """
    latents, k = initial, 0
    while k < (policy.total_steps if until is None else until):
        drawn, rows_per_state = noise(k) if k in stochastic else None, 1
        if drawn is not None and len(latents) < len(drawn):
            rows_per_state = 2 if len(latents) > 1 else len(drawn)
            latents = latents.repeat_interleave(rows_per_state, dim=0)[: len(drawn)]
        transition, velocity = policy.transition(
            latents, k, conditioning=conditioning, as_ode=drawn is None, rows_per_state=rows_per_state
        )
        following = transition.mean if drawn is None else transition.sample(drawn)
        span = 1 if drawn is None else policy.span(k)
        yield Step(k=k, span=span, latents=latents, velocity=velocity, transition=transition, next_latents=following)
        latents, k = following, k + span


@dataclass(frozen=True)
class Sampled:
    """The trajectories of a shard of N members."""

    conditioning: tuple[Conditioning, ...]
    chosen: tuple[int, ...]
    """The trained steps k, ascending."""
    initial: Float[Tensor, "R C H W"]
    steps: list[Step]
    final: Float[Tensor, "N C H W"]
    """Clean latents of the finished images."""
    stochastic: list[Step]
    """The trained steps, as far as the kernel has noise."""


@dataclass(frozen=True)
class Completed:
    """The images of a shard, still as clean latents."""

    clean: Float[Tensor, "I C H W"]
    index: Int[Tensor, "N P"]
    """The image of each member's points, as in `Rollout.image_index`."""
    points: int = 0
    """How many images complete a point; they come first."""
    further: Int[Tensor, "N E"] | None = None
    """The image of each member's further granularities."""


@torch.inference_mode()
def rollout_shard(
    policy: FlowPolicy, request: ShardRequest, config: RunConfig, meter: Meter | None = None
) -> tuple[Rollout, UInt8[np.ndarray, "I H W 3"]]:
    """Roll out a shard: its trajectories and the images to be scored.

    The images are the completed points of the stochastic steps (if the credit rule compares them), then the finished
    images, then the ends of further granularities. After the last stochastic step the finished image itself stands for
    the point, not an estimate. With shared initial noise the first point is the same for all members: the group's first
    shard completes it once, and the other shards refer to it.

    Args:
        policy: the policy with the adapter that the request names.
        request: prompt, members and keys of the noise.
        meter: counts and times the shard's work.

    Returns:
        The trajectories, and I images, uint8 [I, H, W, 3].

    Raises:
        NonFiniteError: the model produced NaN or infinity.
    """
    meter, begun = meter or Meter(), policy.evaluations
    with meter.timed("sampling"):
        sampled = _sampled(policy, request, config)
    main = policy.evaluations - begun
    completed = _finished(sampled)
    if config.scores_points or config.sampling.granularities[1:]:
        with meter.timed("completing"):
            complete_images = _points if config.scores_points else _granularities
            completed = complete_images(policy, request, config, sampled)
    meter.count("main_evaluations", main)
    meter.count("completion_evaluations", policy.evaluations - begun - main)
    rollout = _packed(policy, request, config, sampled, completed)
    repeated = policy.backbone.decoded_again
    with meter.timed("decoding"):
        images = policy.backbone.decode(completed.clean, points=completed.points)
        if sampled.stochastic and config.records(
            iteration=request.iteration, group=request.group, first_member=request.first_member
        ):
            previews = _previews(policy, sampled.stochastic, request.members, config.status.trajectories)
            rollout = replace(rollout, previews=previews)
    if again := policy.backbone.decoded_again - repeated:
        meter.count("images_decoded_again", again)
    meter.count("images", len(images))
    meter.count("images_mb", images.nbytes / 1e6)
    return rollout, images


def _sampled(policy: FlowPolicy, request: ShardRequest, config: RunConfig) -> Sampled:
    """Take the steps of a shard's trajectories; the first phase of a rollout."""
    members = range(request.first_member, request.first_member + request.members)
    device = next(policy.backbone.transformer.parameters()).device

    def noise(step: int, of: range | list[int] = members) -> Float[Tensor, "N C H W"]:
        return trajectory_noise(
            seed=config.seed,
            iteration=request.iteration,
            group=request.group,
            members=of,
            step=step,
            shape=policy.backbone.latent_shape,
        ).to(device)

    chosen = policy.steps_of(
        seed=config.seed,
        iteration=request.iteration,
        group=request.group,
        shard=request.first_member // request.members,
    )
    explored = chosen if config.sampling.kernel != "ode" else ()
    strides = policy.strides(explored)
    initial = noise(INITIAL, [SHARED]) if config.sampling.shared_noise else noise(INITIAL)
    conditioning = policy.conditioning(request.prompt.text, request.prompt.negative, request.prompt.conditions)
    # A merged step spans several steps of the schedule; the tail begins behind all of them.
    behind = explored[-1] + policy.span(explored[-1]) if explored else 0
    until = policy.total_steps if explored and not config.sampling.has_tail else behind
    steps = list(
        trajectory(
            policy,
            initial=initial,
            conditioning=conditioning,
            noise=lambda step: noise(step, members[:: strides.get(step, 1)]),  # of each branch's first member
            stochastic=explored,
            until=until,
        )
    )
    final = policy.tail(until, steps[-1].next_latents if steps else initial, conditioning)
    _require_finite(final, f"latents of group {request.group} in iteration {request.iteration}")
    return Sampled(
        conditioning=conditioning,
        chosen=chosen,
        initial=initial,
        steps=steps,
        final=final,
        stochastic=[step for step in steps if step.k in explored],
    )


def _finished(sampled: Sampled) -> Completed:
    """Score the finished images only."""
    return Completed(clean=sampled.final, index=torch.arange(len(sampled.final)).unsqueeze(1))


def _points(policy: FlowPolicy, request: ShardRequest, config: RunConfig, sampled: Sampled) -> Completed:
    """Complete the points of the stochastic steps in one batch; the finished images follow theirs."""
    members, shared = len(sampled.final), config.sampling.shared_noise
    # The group's first shard completes the point that all members share; with window `branch` each shard has its own.
    is_elsewhere = shared and request.first_member > 0 and config.sampling.window.rule != "branch"
    first_rows = 0 if is_elsewhere else 1 if shared else members
    rows = [first_rows] + [
        0 if number % config.completion.every else members for number in range(1, len(sampled.stochastic))
    ]
    member = torch.arange(members)
    first = torch.full_like(member, COMMON_IMAGE) if is_elsewhere else torch.zeros_like(member) if shared else member
    # Images lie one point after the other: point `number` begins where the rows of the points before it end.
    ends = [*accumulate(rows)]
    later = [ends[number] + member if count else member * 0 + NO_IMAGE for number, count in enumerate(rows[1:])]
    index = torch.stack([first, *later, ends[-1] + member], dim=1)
    if not sum(rows):
        return Completed(clean=sampled.final, index=index)
    # Before a shared point all members are in one state, so its first row stands for them.
    begins = [(step, count) for step, count in zip(sampled.stochastic, rows, strict=True) if count]
    completed = complete(
        latents=torch.cat([step.latents[:count] for step, count in begins]),
        first_velocity=torch.cat([step.velocity[:count] for step, count in begins]),
        grid=stack_grids(
            [substep_grid(config.completion, sigmas=policy.sigmas, k=step.k) for step, _ in begins],
            [count for _, count in begins],
        ).to(sampled.final.device),
        velocity=lambda latents, sigma: policy.velocity(latents, sigma, sampled.conditioning),
        solver=config.completion.solver,
    )
    return Completed(clean=torch.cat([completed, sampled.final]), index=index, points=len(completed))


def _granularities(policy: FlowPolicy, request: ShardRequest, config: RunConfig, sampled: Sampled) -> Completed:  # noqa: ARG001
    """Integrate from the step after the last stochastic one, all members for each further granularity."""
    granularities = config.sampling.granularities[1:]
    after = next(step for step in sampled.steps if step.k > sampled.stochastic[-1].k)
    grids = [granular_grid(policy.sigmas, k=after.k, granularity=each) for each in granularities]
    completed = complete(
        latents=after.latents.repeat(len(granularities), 1, 1, 1),
        first_velocity=after.velocity.repeat(len(granularities), 1, 1, 1),
        grid=stack_grids(grids, [len(after.latents)] * len(granularities)).to(sampled.final.device),
        velocity=lambda latents, sigma: policy.velocity(latents, sigma, sampled.conditioning),
    )
    clean = torch.cat([sampled.final, completed])
    # Images lie granularity by granularity; the index has a row for each member.
    further = torch.arange(len(sampled.final), len(clean)).view(len(granularities), -1).T
    return replace(_finished(sampled), clean=clean, further=further)


def _packed(
    policy: FlowPolicy, request: ShardRequest, config: RunConfig, sampled: Sampled, completed: Completed
) -> Rollout:
    """Copy what the learner needs to the host; the last phase of a rollout."""

    def by_member(columns: Iterable[Float[Tensor, "R ..."]]) -> np.ndarray:
        return torch.stack([_of_members(rows, request.members) for rows in columns], dim=1).cpu().numpy()

    def log_probs(step: Step) -> Float[Tensor, " R"]:
        rows_per_state = policy.rows_per_state(step.k, sampled.chosen, len(step.latents))
        return policy.log_prob(step.transition, step.next_latents, rows_per_state=rows_per_state)

    final, stochastic = sampled.final, sampled.stochastic
    visited = [step.next_latents for step in sampled.steps for _ in range(step.span)]
    # Points that a tail skips hold the clean latents; a kernel without noise trains on these alone.
    skipped = [final] * (policy.total_steps - len(visited))
    return Rollout(
        request=request,
        steps=sampled.chosen,
        latents=by_member([sampled.initial, *visited, *skipped] if stochastic else [final]),
        log_probs=by_member(map(log_probs, stochastic)) if stochastic else None,
        image_index=completed.index.numpy(),
        further_index=None if completed.further is None else completed.further.numpy(),
        means=by_member(step.transition.mean for step in stochastic)
        if config.learner.objective in ("guarded", "masked")
        else None,
    )


@torch.inference_mode()
def generate(policy: FlowPolicy, request: GenerateRequest, lora: Lora | None = None) -> UInt8[np.ndarray, "B H W 3"]:
    """Make images by the probability-flow ODE, one for each prompt and number of the request.

    Args:
        request: prompts, keys of the noise, steps, and how many of them the adapter takes.
        lora: the policy's adapter, which is switched off for the steps that the base model takes.

    Returns:
        Images, uint8 [B, H, W, 3].

    Raises:
        ContractError: the base model takes steps, and `lora` is None.
        ModelError: the model cannot generate images of the request's size.
        NonFiniteError: the model produced NaN or infinity.
    """
    pairs = [policy.conditioning(prompt.text, prompt.negative, prompt.conditions) for prompt in request.prompts]
    alike: dict[tuple[torch.Size, ...], list[int]] = {}
    for row, pair in enumerate(pairs):
        alike.setdefault(tuple(each.shape for each in pair[0].conditions), []).append(row)
    images = [
        _generate(policy, request, rows, tuple(map(stack, zip(*(pairs[row] for row in rows), strict=True))), lora)
        for rows in alike.values()
    ]
    return np.concatenate(images)[np.argsort(np.concatenate(list(alike.values())))]


def _generate(
    policy: FlowPolicy,
    request: GenerateRequest,
    rows: list[int],
    conditioning: tuple[Conditioning, ...],
    lora: Lora | None,
) -> UInt8[np.ndarray, "R H W 3"]:
    """Make the images of some rows of a request, whose condition images have the same sizes."""
    backbone = policy.backbone.sized(*request.size) if request.size else policy.backbone
    device = next(policy.backbone.transformer.parameters()).device
    shape = backbone.latent_shape
    keys = [(request.prompts[row], request.numbers[row]) for row in rows]
    latents = torch.stack([normal("draw", request.seed, p.index, number, shape=shape) for p, number in keys]).to(device)
    sigmas = backbone.sigmas(request.steps).to(device)
    with ExitStack() as rest:
        for k in range(request.steps):
            if k == request.adapter_steps:
                if lora is None:
                    raise ContractError(f"a request whose steps from {k} are the base model's needs `lora`, got none")
                rest.enter_context(lora.adapter_disabled())
            sigma, sigma_next = sigmas[k].expand(len(latents)), sigmas[k + 1].expand(len(latents))
            velocity = policy.velocity(latents, sigma, conditioning)
            latents = ode(Start(latents, velocity, sigma, sigma_next)).mean
    _require_finite(latents, f"latents of images generated by adapter version {request.adapter_version}")
    return policy.backbone.decode(latents)


def _of_members(rows: Float[Tensor, "R ..."], members: int) -> Float[Tensor, "N ..."]:
    """Return a row for each member; fewer rows are branches, whose members are neighbours."""
    if len(rows) == members:
        return rows
    stride = 1
    # ceil(members / stride) branches of `stride` members; the last branch may have fewer.
    while -(-members // stride) > len(rows):
        stride *= 2
    return rows[torch.arange(members, device=rows.device) // stride]


def _require_finite(latents: Tensor, what: str) -> None:
    if not torch.isfinite(latents).all():
        raise NonFiniteError(f"{what} must be finite, got NaN or infinity")


def _previews(
    policy: FlowPolicy, stochastic: list[Step], members: int, most: int
) -> UInt8[np.ndarray, "M S height width 3"] | None:
    """Decode Tweedie's estimates before the stochastic steps; they need no forward.

    Args:
        stochastic: the stochastic steps, with rows for members or branches.
        members: N, members of the shard.

    Returns:
        Small images; None if the VAE overflows, for an image that nobody scores must not end a run.
    """
    columns = []
    for step in stochastic:
        sigma = policy.sigmas[step.k].expand(len(step.latents)).to(step.latents.device)
        clean = clean_estimate(latents=step.latents, velocity=step.velocity, sigma=sigma)
        columns.append(_of_members(clean, members)[:most])
    estimates = torch.stack(columns, dim=1)
    try:
        images = policy.backbone.decode(estimates.flatten(0, 1), points=estimates.shape[:2].numel())
    except NonFiniteError as error:
        log.warning("estimates of trajectories that would be shown cannot be decoded: %s", error)
        return None
    return _small(images.reshape(*estimates.shape[:2], *images.shape[1:]))


LONGEST = 128
"""Pixels of an excerpt's longer side; of larger images, only every n-th pixel is kept."""


def excerpt_of(rollout: Rollout, images: UInt8[np.ndarray, "I H W 3"], *, members: int) -> Excerpt:
    """Cut out the first `members` trajectories of a group's first shard.

    An image before a step shows the completed point; where there is none, it is the preview.

    Args:
        rollout: the shard, with previews unless no step has noise.
        images: its images, uint8 [I, H, W, 3].
        members: M, how many trajectories; all if there are fewer.

    Returns:
        M trajectories with images of at most `LONGEST` pixels.

    Raises:
        ContractError: the shard has no previews.
    """
    index, steps = rollout.image_index[:members], rollout.steps
    if rollout.log_probs is None:
        return Excerpt(request=rollout.request, steps=steps, images=_small(images[index]))
    if rollout.previews is None:
        raise ContractError(f"a recorded shard must have previews, got none in iteration {rollout.request.iteration}")
    finished = _small(images[index[:, -1:]])
    shown = np.concatenate([rollout.previews[:members], finished], axis=1)
    completed = index[:, :-1] if index.shape[1] > 1 else np.full((len(index), len(steps)), NO_IMAGE)
    rows, columns = np.nonzero(completed != NO_IMAGE)
    shown[rows, columns] = _small(images[completed[rows, columns]])
    skipped = tuple(k for k, own in zip(steps, completed[0], strict=True) if own == NO_IMAGE)
    return Excerpt(request=rollout.request, steps=steps, images=shown, skipped=skipped)


def _small(images: UInt8[np.ndarray, "... H W 3"]) -> UInt8[np.ndarray, "... h w 3"]:
    stride = -(-max(images.shape[-3:-1]) // LONGEST)
    return np.ascontiguousarray(images[..., ::stride, ::stride, :])
