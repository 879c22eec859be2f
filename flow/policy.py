"""FlowPolicy: the only source of a step's velocity, mean, std and log-prob.

Rollout actors take their steps from it and the learner differentiates through it; neither computes any of these itself.
With equal weights and equal batch shapes a replay therefore gives the same log-prob bit for bit (ratio exactly 1).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from flow.adapter.lora import Lora
from flow.maths.completion import complete, substep_grid
from flow.maths.schedule import linear_sigmas, shifted_sigmas
from flow.maths.transition import Start, Transition, cps, dance_sde, ddim_sde, flow_sde, ode
from flow.maths.windows import (
    require_trainable,
    splits_of,
    strides_of,
    window_lengths,
    window_period,
    window_steps,
    window_union,
)
from flow.models.contract import Backbone, Conditioning, stack
from flow.models.hub import lora_path
from flow.models.load import FrozenModel, load_located, locate_for_images
from flow.models.reading import collection_paused
from flow.pieces import even_pieces
from protocol.config.run import RunConfig
from protocol.config.sampling import SamplingConfig
from protocol.errors import ConfigError
from protocol.messages import ConditionImage


class FlowPolicy:
    """A backbone with a schedule, a kernel and a guidance weight.

    It counts its work: `evaluations` are rows through the transformer, so guidance counts twice;
    `gradient_evaluations` are the rows with a backward.

    `steps` are the steps that can be stochastic: their std is at least `std_min`, and the last step is not among them.
    `steps_of` returns one shard's. With `merge_std` a stochastic step spans as many steps of the schedule as its
    std needs. Every other step runs as ODE and is never trained. With the kernel `ode` no step is stochastic, and
    `steps` are all T steps, since every noise level can be trained.

        policy = FlowPolicy(backbone, config.sampling, guidance=1.0)
        transition, velocity = policy.transition(latents, k, conditioning=policy.conditioning("a red circle", ""))
    """

    def __init__(
        self,
        backbone: Backbone,
        config: SamplingConfig,
        *,
        guidance: float,
        forward_batch: int | None = None,
        learner_batch: int | None = None,
        splits_guidance: bool = False,
    ) -> None:
        """
        Args:
            config: sets kernel, schedule, noise, window and splits.
            guidance: weight w of classifier-free guidance; 1 takes one forward, more take two.
            forward_batch: most states in one forward; None takes all at once.
            learner_batch: the same for the learner's forwards, by default `forward_batch`.
            splits_guidance: whether branches of different length take a forward each.
        """
        self.backbone = backbone
        self.guidance = guidance
        self.forward_batch = forward_batch
        self.learner_batch = learner_batch or forward_batch
        self.splits_guidance = splits_guidance
        self.sigmas: Float[Tensor, " points"] = _sigmas(backbone, config)
        self._sigmas_on: dict[torch.device, Float[Tensor, " points"]] = {}
        self.evaluations = self.gradient_evaluations = 0
        self._config = config
        self._spans = self._merged()
        self.steps = tuple(self._spans)
        if not self.steps:
            raise ConfigError(
                f"sampling must leave a step with std of at least std_min {config.std_min}, got none:"
                " raise noise_level or steps, or lower std_min"
            )
        require_trainable(config.window, candidates=self.steps, total=config.steps)
        for length in self._window_lengths:
            splits_of(config.splits, self.steps[:length])

    @property
    def total_steps(self) -> int:
        """T."""
        return len(self.sigmas) - 1

    def span(self, k: int) -> int:
        """Return how many steps of the schedule step k crosses when it is stochastic; 1 without merging."""
        return self._spans.get(k, 1)

    def step_size(self, k: int) -> float:
        """Return h, the difference of sigma that step k crosses when it is stochastic."""
        return (self.sigmas[k] - self.sigmas[k + self.span(k)]).item()

    def steps_of(self, *, seed: int, iteration: int, group: int, shard: int) -> tuple[int, ...]:
        """The stochastic steps of one shard: `steps` inside its window.

        Args:
            iteration: counted from 0.

        Returns:
            Steps k, ascending.
        """
        return window_steps(
            self._config.window,
            candidates=self.steps,
            total=self.total_steps,
            seed=seed,
            iteration=iteration,
            group=group,
            shard=shard,
        )

    @property
    def most_steps(self) -> int:
        """The largest number of stochastic steps that a shard can have."""
        return max(self._window_lengths)

    @property
    def _window_lengths(self) -> set[int]:
        return window_lengths(self._config.window, candidates=self.steps, total=self.total_steps)

    def strides(self, explored: Sequence[int]) -> dict[int, int]:
        """Map a shard's stochastic steps to the number of consecutive members that share each; absent means 1."""
        return strides_of(self._config.splits, explored)

    @property
    def window_period(self) -> int:
        """The groups of an iteration after which the windows repeat."""
        return window_period(self._config.window, candidates=self.steps, total=self.total_steps)

    @property
    def trained(self) -> tuple[int, ...]:
        """The steps of `steps` that the windows of a run's shards hold, ascending."""
        return window_union(self._config.window, candidates=self.steps, total=self.total_steps)

    @property
    def stds(self) -> dict[int, float]:
        """Std of each step that can be stochastic, by step."""
        return {k: self.std(k) for k in self.steps}

    def conditioning(
        self, text: str, negative: str, conditions: tuple[ConditionImage, ...] = ()
    ) -> tuple[Conditioning, ...]:
        """Return the embeddings for `velocity`: the negative prompt's if guidance is above 1, then the prompt's.

        Both hold the latents of the condition images.
        """
        positive = self.backbone.encode(text, conditions)
        return (self.backbone.encode(negative, conditions), positive) if self.guidance > 1 else (positive,)

    def velocity(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], conditioning: tuple[Conditioning, ...]
    ) -> Float[Tensor, "B C H W"]:
        """Return the guided velocity by the family's rule, mostly v_u + w (v_c - v_u), from 2B rows; w = 1 needs B.

        More than `forward_batch` states are split evenly into several forwards.

        Args:
            latents: states x [B, C, H, W].
            sigma: noise level of each state, in [0, 1] [B].
            conditioning: from `conditioning`; a row for each state, or one row for all.

        Returns:
            v [B, C, H, W], on the device of the states.
        """
        count = len(latents)
        velocities = [
            self._guided(latents[piece], sigma[piece], [_rows_of(each, piece, count) for each in conditioning])
            for piece in even_pieces(count, self.forward_batch)
        ]
        whole = torch.cat(velocities) if len(velocities) > 1 else velocities[0]
        return whole.to(latents.device)  # once, so that the first of several GPUs need not wait before the next piece

    def _guided(
        self, latents: Float[Tensor, "B C H W"], sigma: Float[Tensor, " B"], rows: Sequence[Conditioning]
    ) -> Float[Tensor, "B C H W"]:
        count = len(latents) * len(rows)
        self.evaluations += count
        self.gradient_evaluations += count * torch.is_grad_enabled()
        if len(rows) == 1:
            return self.backbone.velocity(latents, sigma, rows[0])
        if self.splits_guidance and rows[0].lengths != rows[1].lengths:
            without, toward = (self.backbone.velocity(latents, sigma, each) for each in rows)
        else:
            both = latents.repeat(2, 1, 1, 1), sigma.repeat(2), stack(rows)
            without, toward = self.backbone.velocity(*both).chunk(2)
        return self.backbone.guide(without, toward, self.guidance)

    def rows_per_state(self, k: int, explored: Sequence[int], rows: int) -> int:
        """Return how many neighbouring rows of a shard have the same state before the stochastic step k.

        Members that share their initial noise are all in the same state when the first stochastic step begins; where
        branches split, two rows are. `transition` computes one velocity for them.

        Args:
            k: the step, one of `explored`.
            explored: stochastic steps of the shard, ascending.
            rows: rows of the shard in step k; members that share the step count as one row.

        Returns:
            1 to `rows`.
        """
        if self._config.shared_noise and k == explored[0]:
            return rows
        return min(rows, 2) if k in splits_of(self._config.splits, explored) else 1

    def transition(
        self,
        latents: Float[Tensor, "B C H W"],
        k: int,
        *,
        conditioning: tuple[Conditioning, ...],
        as_ode: bool = False,
        rows_per_state: int = 1,
    ) -> tuple[Transition, Float[Tensor, "B C H W"]]:
        """Return step k from these states, and the velocity that it uses.

        Args:
            k: the step, 0 to T - 1.
            as_ode: leave the noise out, as outside a window.
            rows_per_state: how many neighbouring rows have the same state; the velocity is computed for the first, and
                its gradient is the sum of theirs.

        Returns:
            The transition to x_{k+1}, or to x_{k+span} for a merged step, and the velocity v [B, C, H, W].
        """
        is_ode = as_ode or k not in self._spans
        following = k + (1 if is_ode else self.span(k))
        sigma, sigma_next = (self.sigma(i, latents) for i in (k, following))
        velocity = self.velocity(latents[::rows_per_state], sigma[::rows_per_state], conditioning)
        if rows_per_state > 1:
            velocity = velocity.repeat_interleave(rows_per_state, dim=0)[: len(latents)]
        kernel = ode if is_ode else self._kernel(k)
        return kernel(Start(latents, velocity, sigma, sigma_next)), velocity

    def tail(
        self, k: int, latents: Float[Tensor, "N C H W"], conditioning: tuple[Conditioning, ...]
    ) -> Float[Tensor, "N C H W"]:
        """Integrate from point k of a trajectory to clean latents, by `sampling.tail`; the point may be clean already.

        Args:
            k: the point, 0 to T.
            latents: states x_k [N, C, H, W].
        """
        if k == self.total_steps:
            return latents
        grid = substep_grid(self._config.tail, sigmas=self.sigmas, k=k).to(latents.device).expand(len(latents), -1)
        return complete(
            latents=latents,
            first_velocity=self.velocity(latents, grid[:, 0], conditioning),
            grid=grid,
            velocity=lambda x, sigma: self.velocity(x, sigma, conditioning),
            solver=self._config.tail.solver,
        )

    def log_prob(
        self, transition: Transition, value: Float[Tensor, "B C H W"], *, rows_per_state: int
    ) -> Float[Tensor, " B"]:
        """Return the log-prob of a whole shard in the pieces in which a learner computes it.

        The rounding of a mean over a row may depend on the number of rows, as a velocity's does.

        Args:
            transition: a step from B states.
            value: the states that it led to [B, C, H, W].
            rows_per_state: as in `transition`.
        """
        parts = []
        for piece in even_pieces(-(-len(value) // rows_per_state), self.learner_batch):
            rows = slice(piece.start * rows_per_state, piece.stop * rows_per_state)
            part = replace(transition, mean=transition.mean[rows], std=transition.std[rows])
            parts.append(part.log_prob(value[rows]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def sigma(self, k: int, latents: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
        """Return sigma_k [B] for these states on their device; it is copied once, since a copy makes the CPU wait."""
        if latents.device not in self._sigmas_on:
            self._sigmas_on[latents.device] = self.sigmas.to(latents.device)
        return self._sigmas_on[latents.device][k].expand(len(latents))

    def std(self, k: int) -> float:
        """Return the std of step k when it is stochastic."""
        return self._std(k, self.span(k))

    def _std(self, k: int, span: int) -> float:
        nothing = torch.zeros(1, 1)
        sigma, sigma_next = self.sigmas[k : k + 1], self.sigmas[k + span : k + span + 1]
        return self._kernel(k)(Start(nothing, nothing, sigma, sigma_next)).std.item()

    def _merged(self) -> dict[int, int]:
        """Return the steps that can be stochastic, each with its span."""
        config = self._config
        if config.kernel == "ode":
            return dict.fromkeys(range(config.steps), 1)
        least = max(config.std_min, config.merge_std, math.ulp(0.0))
        spans: dict[int, int] = {}
        k = 0
        while k < config.steps - 1:
            longest = config.steps - 1 - k if config.merge_std else 1
            span = next((span for span in range(1, longest + 1) if self._std(k, span) >= least), 0)
            if span:
                spans[k] = span
            k += max(1, span)
        return spans

    def _kernel(self, k: int) -> Callable[[Start], Transition]:
        config, sigma_first = self._config, self.sigmas[1].item()
        level = config.noise_levels[k] if config.noise_levels else config.noise_level
        if config.kernel == "ode":
            return ode
        if config.kernel == "flow_sde":
            return partial(flow_sde, sigma_first=sigma_first, noise_level=level)
        if config.kernel == "ddim_sde":
            start = sigma_first if config.first_step == "clamp" else 1.0
            return partial(ddim_sde, sigma_first=start, noise_level=level)
        if config.kernel == "dance_sde":
            return partial(dance_sde, noise_level=level)
        return partial(cps, noise_level=level, log_prob_form=config.log_prob)


def _rows_of(conditioning: Conditioning, piece: slice, count: int) -> Conditioning:
    """Return the embeddings of a piece of `count` states; a row that all share is repeated for the piece only."""
    return conditioning.rows(piece) if len(conditioning) == count else conditioning.repeat(piece.stop - piece.start)


def _sigmas(backbone: Backbone, config: SamplingConfig) -> Float[Tensor, " points"]:
    if config.schedule == "model":
        return backbone.sigmas(config.steps)
    return (linear_sigmas if config.schedule == "linear" else shifted_sigmas)(steps=config.steps)


def build_policy(config: RunConfig, *, device: str, frozen: FrozenModel | None = None) -> tuple[FlowPolicy, Lora]:
    """Load the model, attach a fresh adapter and put the policy on top.

    Args:
        frozen: the model in memory, with `device` as its first; without it the model is loaded.

    Raises:
        ModelError: the model cannot be loaded, or the adapter binds no module.
    """
    with collection_paused():
        located = frozen.located if frozen else locate_for_images(config.model)
        backbone = frozen.backbone() if frozen else load_located(located, device=device)
        lora = Lora(backbone.transformer, located.lora, seed=config.seed)
    return policy_of(backbone, config), lora


def start_adapter(lora: Lora, config: RunConfig) -> None:
    """Turn a fresh adapter into the adapter of iteration 0: load `model.lora.start` into it, if there is one.

    Raises:
        ModelError: the saved LoRA cannot be read or belongs to another model.
    """
    start, revision = config.model.lora.start, config.model.lora.revision
    if start:
        lora.start_from(lora_path(start, revision), lora.config)


def policy_of(backbone: Backbone, config: RunConfig) -> FlowPolicy:
    model = config.model
    return FlowPolicy(
        backbone,
        config.sampling,
        guidance=model.guidance,
        forward_batch=model.forward_batch,
        learner_batch=config.learner.batch,
        splits_guidance=model.splits_guidance,
    )
