"""The learner: owns the trained adapter and its optimizer; turns one iteration's groups into the next version."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from flow.build import build_policy
from flow.models.folder import adapter_config
from learner.credit.assign import CreditedGroup
from learner.credit.mixture import assign_mixed
from learner.credit.step_weights import step_weights
from learner.update.ema import AdapterAverage
from learner.update.ledger import duplicates, ledger
from learner.update.metrics import group_metrics, slope_metrics
from learner.update.micro_batches import count_pairs, micro_batches, split_micro_batches
from learner.update.objective import Objective, PairLosses
from learner.update.probe import probe_parity
from protocol.config.run import RunConfig
from protocol.errors import ContractError, NonFiniteError
from protocol.messages import Adapter, Credit, LearnerState, ScoredGroup

SLOTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter."""
SCALER = "grad_scaler"
"""Stands for a parameter's name in the saved state of float16's loss scale."""


@dataclass
class UpdateStatistics:
    """What the pairs of one iteration showed, gathered while they pass."""

    ratios: list[torch.Tensor] = field(default_factory=list)
    first_ratios: list[torch.Tensor] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    divergences: list[torch.Tensor] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def add(self, pairs: PairLosses, total: float, *, is_first: bool) -> None:
        """One micro-batch of the iteration; `total` is its part of the loss."""
        self.losses.append(total)
        self.ratios.append(pairs.ratio.detach().cpu())
        self.divergences.append(pairs.kl.cpu())
        if is_first:
            self.first_ratios.append(pairs.ratio.detach().cpu())

    def metrics(self, clip_range: float) -> dict[str, float]:
        """Numbers by name; ratios of the first update show whether learner and rollout agree (exactly 1)."""
        ratios = torch.cat(self.ratios) if self.ratios else torch.ones(1)
        first = torch.cat(self.first_ratios) if self.first_ratios else torch.ones(1)
        divergences = torch.cat(self.divergences) if self.divergences else torch.zeros(1)
        return {
            "train/loss": float(np.sum(self.losses)) / max(1, len(self.grad_norms)),
            "train/grad_norm": float(np.mean(self.grad_norms)) if self.grad_norms else 0.0,
            "train/ratio_mean": ratios.mean().item(),
            "train/first_ratio_deviation": (first - 1).abs().max().item(),
            "train/clip_fraction": ((ratios - 1).abs() > clip_range).float().mean().item(),
            "train/approx_kl": (0.5 * ratios.log().square()).mean().item(),
            "train/reference_kl": divergences.mean().item(),
        }


class Learner:
    """Made once in the learner's process; `step` counts iterations and is the version of the adapter.

    learner = Learner(config)
    metrics = learner.update(groups)
    adapter = learner.adapter()
    """

    def __init__(self, config: RunConfig, *, device: str = "cpu") -> None:
        self._config = config
        self._device = torch.device(device)
        self._policy, self._lora = build_policy(config, device=device)
        if config.model.lora.start:
            self._lora.start_from(config.model.lora.start, adapter_config(config.model))
        self._scaler = GradScaler(self._device.type, enabled=config.model.dtype == "float16")
        settings = config.learner
        self._objective = Objective(self._policy, self._lora, settings)
        self._average = AdapterAverage(self._lora.parameters, settings.average) if settings.average.decay else None
        self._baseline: torch.Tensor | None = None
        self._step_weights = step_weights(
            config.credit.step_weights,
            total=self._policy.total_steps,
            stds={k: self._policy.std(k) for k in self._policy.steps},
        )
        self._optimizer = torch.optim.AdamW(
            self._lora.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
        )
        self.iteration = 0
        self._credits: list[Credit] = []

    def update(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Learn from one iteration's groups in `epochs` passes of `updates_per_iteration` optimizer steps.

        Raises:
            ContractError: a group is incomplete or another iteration's, or no step reward of the iteration is valid.
            NonFiniteError: loss or gradient is not finite; the adapter are then unchanged by that optimizer step.
        """
        places = ledger(groups, iteration=self.iteration)
        assignment = assign_mixed(
            groups,
            self._config.credit,
            rewards=self._config.reward_weights,
            members=self._config.group.size,
            total=self._policy.total_steps,
            step_weights=self._step_weights,
            baseline=self._baseline,
        )
        credited = assignment.groups
        if not any(group.step_valid.any() for group in credited):
            reason = next(
                (why for group in groups for s in group.shards for why in s.scores.reasons if why), "none given"
            )
            raise ContractError(
                f"an iteration needs at least one step reward whose scores are valid, got none; first reason: {reason}"
            )
        probed = self._probe(groups)
        statistics = UpdateStatistics()
        size = len(credited) // self._config.learner.updates_per_iteration
        for epoch in range(self._config.learner.epochs):
            for start in range(0, len(credited), size):
                self._optimise(credited[start : start + size], statistics, epoch=epoch, is_first=epoch == start == 0)
        self._baseline = assignment.baseline
        self.iteration += 1
        self._credits = [_credit(group, version=self.iteration) for group in credited]
        return {
            **places,
            **group_metrics(groups, credited),
            **slope_metrics(assignment.slopes),
            "group/duplicates": float(sum(duplicates(group.rollouts) for group in credited)),
            **statistics.metrics(self._config.learner.clip_range),
            **probed,
            "adapter/version": float(self.iteration),
        }

    def adapter(self) -> Adapter:
        """A copy of the adapter; its version is `step`."""
        return self._lora.export(version=self.iteration)

    def credit(self, group: int) -> Credit:
        """What the steps of one group of the newest update earned."""
        return self._credits[group]

    def state(self) -> LearnerState:
        """Adapter, optimizer and step."""
        optimizer: dict[str, np.ndarray] = {}
        for name, parameter in self._lora.parameters.items():
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                optimizer[f"{name}/{slot}"] = value.detach().cpu().numpy().copy()
        for slot, value in self._scaler.state_dict().items():
            optimizer[f"{SCALER}/{slot}"] = np.array(value, np.float32)
        baseline = [] if self._baseline is None else self._baseline.tolist()
        return LearnerState(
            iteration=self.iteration,
            adapter=self.adapter(),
            optimizer=optimizer,
            average=self._average.export(version=self.iteration) if self._average else None,
            baseline=tuple(None if math.isnan(value) else value for value in baseline),
        )

    def restore(self, state: LearnerState) -> None:
        """Go on exactly where `state` was taken."""
        self._lora.load(state.adapter)
        self._optimizer.state.clear()
        for name, parameter in self._lora.parameters.items():
            if f"{name}/step" in state.optimizer:
                self._optimizer.state[parameter] = {
                    slot: torch.from_numpy(np.array(state.optimizer[f"{name}/{slot}"])) for slot in SLOTS
                }
        for slots in self._optimizer.state.values():
            for slot in ("exp_avg", "exp_avg_sq"):
                slots[slot] = slots[slot].to(self._device)
        now = self._scaler.state_dict()
        held = {slot: state.optimizer[f"{SCALER}/{slot}"] for slot in now if f"{SCALER}/{slot}" in state.optimizer}
        if now and len(held) == len(now):
            self._scaler.load_state_dict({slot: type(now[slot])(value.item()) for slot, value in held.items()})
        if self._average:
            self._average.load(state.average or state.adapter)
        baseline = [math.nan if value is None else value for value in state.baseline]
        self._baseline = torch.tensor(baseline, dtype=torch.float64) if baseline else None
        self.iteration = state.iteration

    def _probe(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        every = self._config.learner.probe_every
        if not every or self.iteration % every:
            return {}
        return probe_parity(
            self._policy, groups, version=self.iteration, bound=self._config.learner.probe_bound, device=self._device
        )

    def _optimise(
        self, groups: Sequence[CreditedGroup], statistics: UpdateStatistics, *, epoch: int, is_first: bool
    ) -> None:
        settings = self._config.learner
        choice = {"step_fraction": settings.step_fraction, "seed": self._config.seed, "epoch": epoch}
        pairs = count_pairs(groups, **choice)
        self._optimizer.zero_grad(set_to_none=True)
        in_order = micro_batches(groups, device=self._device, keeps_idle=settings.kl.weight > 0, **choice)
        for micro_batch in split_micro_batches(in_order, most=self._config.model.forward_batch):
            losses = self._objective(micro_batch)
            total = losses.loss.sum() / pairs
            if not torch.isfinite(total):
                raise NonFiniteError(f"the loss of step {micro_batch.k} must be finite, got {total.item()}")
            self._scaler.scale(total).backward()
            statistics.add(losses, total.item(), is_first=is_first)
        if all(parameter.grad is None for parameter in self._lora.parameters.values()):
            return
        self._scaler.unscale_(self._optimizer)
        norm = clip_grad_norm_(self._lora.parameters.values(), settings.max_grad_norm)
        is_overflow = not torch.isfinite(norm)
        if is_overflow and self._scaler.get_scale() <= 1:
            raise NonFiniteError(f"the gradient norm must be finite, got {norm.item()}")
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if is_overflow:
            return
        statistics.grad_norms.append(norm.item())
        if self._average:
            self._average.update(self._optimizer_steps() - 1)

    def _optimizer_steps(self) -> int:
        """Optimizer steps so far; part of AdamW's state, and so of every checkpoint."""
        return max(int(slots["step"].item()) for slots in self._optimizer.state.values())


def _credit(group: CreditedGroup, *, version: int) -> Credit:
    return Credit(
        adapter_version=version,
        gains=group.step_rewards.where(group.step_valid, torch.nan).numpy(),
        advantages=group.advantages.numpy(),
    )
