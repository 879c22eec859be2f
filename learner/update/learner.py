"""The learner: owns the trained adapter and its optimizer, and turns one iteration's groups into the next version."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from flow.models.folder import adapter_config
from flow.policy import build_policy
from learner.credit.assign import Assignment, RewardTables, assign_credit, reward_tables
from learner.credit.step_weights import step_weights
from learner.update.ema import AdapterAverage
from learner.update.metrics import UpdateStatistics, group_metrics
from learner.update.micro_batches import StepChoice, count_pairs, micro_batches, split_micro_batches
from learner.update.objective import Objective
from learner.update.probe import probe_parity
from protocol.config.run import RunConfig
from protocol.errors import ContractError, NonFiniteError
from protocol.messages import Adapter, Credit, LearnerState, ScoredGroup

SLOTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter."""
SCALER = "grad_scaler"
"""Prefix of float16's loss scale in the saved optimizer state, where others have a parameter's name."""


class Learner:
    """Owns adapter and optimizer. Made once in the learner's process; `iteration` is the adapter's version.

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

        Returns:
            Metrics by name.

        Raises:
            ContractError: a group is incomplete or another iteration's, or no step of the iteration has a step reward.
            NonFiniteError: loss or gradient is not finite; that optimizer step then leaves the adapter unchanged.
        """
        self._require_own(groups)
        tables = reward_tables(groups, members=self._config.group.size, total=self._policy.total_steps)
        assignment = assign_credit(
            tables,
            self._config.credit,
            reward_weights=self._config.reward_weights,
            step_weights=self._step_weights,
            baseline=self._baseline,
        )
        if assignment.step_rewards.isnan().all():
            reasons = (reason for group in groups for shard in group.shards for reason in shard.scores.reasons)
            raise ContractError(
                "an iteration needs at least one step reward whose scores are valid, got none; first reason:"
                f" {next(filter(None, reasons), 'none given')}"
            )
        group_credits = _credits(tables, assignment, version=self.iteration + 1)
        probed = self._probe(groups)
        statistics = UpdateStatistics()
        size = len(groups) // self._config.learner.updates_per_iteration
        for epoch in range(self._config.learner.epochs):
            for start in range(0, len(groups), size):
                own = slice(start, start + size)
                self._optimizer_step(
                    groups[own], group_credits[own], statistics, epoch=epoch, is_first=epoch == start == 0
                )
        first = self.iteration * len(groups)
        self._baseline, self._credits = assignment.baseline, group_credits
        self.iteration += 1
        return {
            "ledger/first": float(first),
            "ledger/last": float(first + len(groups) - 1),
            **group_metrics(groups, tables, assignment),
            **statistics.metrics(self._config.learner.clip_range),
            **probed,
            "adapter/version": float(self.iteration),
        }

    def adapter(self) -> Adapter:
        """Copy the adapter; its version is `iteration`."""
        return self._lora.export(version=self.iteration)

    def credit(self, group: int) -> Credit:
        """Return the credit of one group of the newest update, by its index."""
        return self._credits[group]

    def state(self) -> LearnerState:
        """Copy adapter, optimizer, running mean and baseline, for a checkpoint."""
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
        """Continue exactly from `state`, which may be older than the learner's own."""
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

    def _require_own(self, groups: Sequence[ScoredGroup]) -> None:
        """Require groups 0 to G - 1 of this iteration, in order.

        So a run learns from each of its groups once: `ledger/first` to `ledger/last` has no gap and no repetition.
        """
        held = [{(s.rollout.request.iteration, s.rollout.request.group) for s in group.shards} for group in groups]
        for index, own in enumerate(held):
            if own != {(self.iteration, index)}:
                raise ContractError(
                    f"iteration {self.iteration} must learn from its own groups 0 to {len(groups) - 1} in order,"
                    f" got (iteration, group) {sorted(own)} at index {index}"
                )

    def _probe(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        every = self._config.learner.probe_every
        if not every or self.iteration % every:
            return {}
        return probe_parity(
            self._policy, groups, version=self.iteration, bound=self._config.learner.probe_bound, device=self._device
        )

    def _optimizer_step(
        self,
        groups: Sequence[ScoredGroup],
        group_credits: Sequence[Credit],
        statistics: UpdateStatistics,
        *,
        epoch: int,
        is_first: bool,
    ) -> None:
        """Learn from one mini-batch: add up its micro-batches' gradients, clip them, step.

        Args:
            groups: of the mini-batch.
            group_credits: one for each group.
            statistics: receives the losses of each micro-batch.
            epoch: counted from 0.
            is_first: whether this is the iteration's first optimizer step.

        Raises:
            NonFiniteError: loss or gradient is not finite. An overflow of float16 lowers the loss scale instead.
        """
        settings = self._config.learner
        choice = StepChoice(fraction=settings.step_fraction, seed=self._config.seed, epoch=epoch)
        pairs = count_pairs(groups, group_credits, choice=choice)
        self._optimizer.zero_grad(set_to_none=True)
        whole = micro_batches(
            groups, group_credits, choice=choice, device=self._device, keeps_idle=settings.kl.weight > 0
        )
        for micro_batch in split_micro_batches(whole, most=self._config.model.forward_batch):
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
            self._average.update(self._optimizer_steps())

    def _optimizer_steps(self) -> int:
        """Count the run's optimizer steps. AdamW keeps the count in its state, and so does every checkpoint."""
        return max(int(slots["step"].item()) for slots in self._optimizer.state.values())


def _credits(tables: RewardTables, assignment: Assignment, *, version: int) -> list[Credit]:
    """Split the tables into one message for each group."""
    values = [None] * len(tables.rewards) if assignment.values is None else assignment.values.numpy()
    rows = zip(tables.rewards, values, assignment.step_rewards, assignment.advantages, strict=True)
    return [
        Credit(
            adapter_version=version,
            rewards=rewards.numpy(),
            values=value,
            step_rewards=earned.numpy(),
            advantages=advantages.numpy(),
        )
        for rewards, value, earned, advantages in rows
    ]
