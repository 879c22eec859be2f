"""A learner worker: owns the trained adapter and its optimizer, and computes its part of an update."""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

from flow.adapter.lora import adapter_of
from flow.meter import Meter
from flow.models.load import FrozenModel
from flow.policy import build_policy, start_adapter
from learner.credit.assign import Assignment, assign_credit
from learner.credit.step_weights import step_weights
from learner.credit.tables import RewardTables, reward_tables
from learner.update.ema import AdapterAverage, AdapterMean, OldAdapter
from learner.update.forward import ForwardObjective
from learner.update.lanes import Exchange, Gradient, Lanes, Seat, added, slice_numbers
from learner.update.metrics import PieceStatistics, StepStatistics, group_metrics, update_metrics, zero_share
from learner.update.micro_batches import ShardTask, micro_batches, noised_batches, split_micro_batches
from learner.update.objective import Objective, PairLosses
from learner.update.probe import probe_clean, probe_parity, take_learner_batch
from learner.update.update import Findings, Finished, MiniBatch, PendingPiece, Snapshot, Update
from protocol.config.run import RunConfig
from protocol.errors import ContractError, NonFiniteError
from protocol.messages import Adapter, Credit, LearnerState, Rollout, ScoredGroup

SLOTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of one parameter."""
Fetch = Callable[[Sequence[Any]], Iterable[Rollout]]
"""Turns handles of shards into their trajectories."""
SCALER = "grad_scaler"
"""Prefix of float16's loss scale in the saved optimizer state; the other entries begin with a parameter's name."""
GROWTH_INTERVAL = 100
"""Optimizer steps without an overflow after which float16's loss scale doubles; an overflow halves it."""


class Learner:
    """One learner worker: owns a copy of adapter and optimizer; `iteration` is the adapter's version.

    All workers take every optimizer step with the same gradient, so their copies stay equal. Each computes the credit
    of all groups from scores, and the gradients of its own lanes' shards. `learner.update.workers` runs an update:

        begin -> feed -> (train -> lane_sum -> step) for each mini-batch -> findings -> finish
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        device: str = "cpu",
        frozen: FrozenModel | None = None,
        seat: Seat | None = None,
        fetch: Fetch = iter,
    ) -> None:
        """
        Args:
            frozen: see `build_policy`.
            seat: this worker's number among the workers; without one it is the only worker.
            fetch: turns handles of shards into their trajectories, in order, one ahead of the training.
        """
        self._config = config
        self._seat = seat or Seat()
        self._fetch = fetch
        self._device = torch.device(device)
        self._policy, self._lora = build_policy(config, device=device, frozen=frozen)
        start_adapter(self._lora, config)
        take_learner_batch(self._policy, self._lora, config, device=self._device)
        is_scaled = config.model.dtype == "float16"
        self._scaler = GradScaler(self._device.type, growth_interval=GROWTH_INTERVAL, enabled=is_scaled)
        settings = config.learner
        self._old = OldAdapter(self._lora.parameters, settings.old) if config.is_forward else None
        self._average = AdapterAverage(self._lora.parameters, settings.average) if settings.average.decay else None
        self._baseline: torch.Tensor | None = None
        self._step_weights = step_weights(
            config.credit.step_weights,
            total=self._policy.total_steps,
            stds=self._policy.stds,
            trained=self._policy.trained,
        )
        self._optimizer = torch.optim.AdamW(
            self._lora.parameters.values(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_epsilon,
            weight_decay=settings.weight_decay,
            fused=True if self._device.type == "cuda" else None,
        )
        self.iteration = 0
        self._credits: list[Credit] = []
        self._lanes = Lanes(self._lora.parameters)
        self._update: Update | None = None
        """The update in progress."""
        self._exported: Adapter | None = None
        self._meter, self._host = Meter(device), Meter()
        self._rest()

    def take_seat(self, seat: Seat) -> None:
        """Take over the lanes of another seat; only between two updates."""
        self._seat = seat

    def begin(self) -> None:
        """Begin the update of an iteration; one that did not finish is undone."""
        if self._update:
            self._load(self._update.before)
        self._update = Update(self._config, self._snapshot(), self._policy.strides, steps_before=self._steps())
        self._wake()
        self._work()
        self._lanes.clear()
        self._scaler.scale(torch.zeros((), device=self._device))  # sets the scale on a worker without a shard too

    def feed(self, groups: Sequence[ScoredGroup]) -> None:
        """Take the next groups of the iteration and assign their credit, from scores alone.

        Raises:
            ContractError: a group is incomplete or belongs to another iteration.
        """
        update = self._running
        self._require_own(groups, first=len(update.groups))
        # One by one where that is their credit, so that it never depends on which groups are complete together.
        parts = [[group] for group in groups] if self._config.credits_groups_alone else [groups]
        with self._host.timed("crediting"):
            for part in parts:
                assigned = _credits(*self._assigned(part), version=self.iteration + 1)
                for group, credit in zip(part, assigned, strict=True):
                    update.add(group, credit)

    def train(self, first: int, count: int, *, epoch: int) -> None:
        """Add the gradients of this worker's shards to its lanes.

        Args:
            first: the first of the fed groups to train on; all of them belong to one mini-batch.
            epoch: pass over the iteration, from 0.

        Raises:
            NonFiniteError: a loss is not finite.
            ParityError: the probe found that learner and rollout disagree.
        """
        batch = self._running.batch(first, epoch)
        tasks = batch.tasks(first, count)
        if self._seat.owns(0) and first == epoch == 0:
            self._probe(tasks[0])
        own = [
            task
            for task in tasks
            if self._seat.owns(task.number % self._config.learner.lanes) and task.teaching(keeps_idle=self._keeps_idle)
        ]
        for task, rollout in zip(own, self._fetched(own), strict=True):
            with self._lanes.adding_to(task.number % self._config.learner.lanes), self._meter.timed("training"):
                self._add_gradients(task, rollout, batch)
        self._settle()

    def lane_sum(self, cut: Exchange) -> list[Gradient]:
        """Add up this worker's lanes of the mini-batch, cut for the exchange `cut`, and begin the next mini-batch."""
        own = range(self._seat.worker, self._config.learner.lanes, self._seat.workers)
        return cut.cut(self._lanes.take(own), self._slices())

    def added(self, *sums: Gradient, cut: Exchange) -> list[Gradient]:
        """Add the sums of some workers, ascending by their seats, and cut the result."""
        return cut.cut(added(sums, np.add), self._slices())

    def step(self, *slices: Gradient, first: int, epoch: int) -> None:
        """Take an optimizer step with the gradient of all workers.

        Args:
            slices: of the sum of all lanes.
            first: the mini-batch's first group.
            epoch: pass over the iteration, from 0.

        Raises:
            NonFiniteError: the gradient is not finite. An overflow of float16 lowers the loss scale instead.
        """
        batch = self._running.batch(first, epoch)
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learner.rate(self.iteration)
        gradient = {name: array for each in slices for name, array in each.items()}
        norm, zeros = self._take_step(gradient, scale=self._divisor(batch) / max(1, batch.pairs))
        self._running.steps.append(StepStatistics(pairs=batch.pairs, grad_norm=norm, zeros=zeros))

    def findings(self) -> Findings:
        """Return the results of the update on this worker's shards."""
        return Findings(pieces=tuple(self._running.pieces), probed=self._running.probed, work=self._work())

    def finish(self, *findings: Findings) -> Finished:
        """End the update with the findings of all workers; the adapter's version grows by one.

        Raises:
            ContractError: no step of the iteration has a step reward.
        """
        update = self._running
        groups = update.groups
        tables, assignment = self._assigned(groups)
        if assignment.step_rewards.isnan().all():
            reasons = (reason for group in groups for shard in group.shards for reason in shard.scores.reasons)
            raise ContractError(
                "an iteration needs at least one step reward whose scores are valid, got none; first reason:"
                f" {next(filter(None, reasons), 'none given')}"
            )
        first = self.iteration * len(groups)
        self._baseline, self._credits = assignment.baseline, update.credits
        if self._old:
            self._old.update(self._steps())
        trained = update_metrics(
            (piece for each in findings for piece in each.pieces),
            update.steps,
            has_ratios=not self._config.is_forward,
        )
        rate = self._config.learner.rate(self.iteration)
        self.iteration += 1
        self._update = self._exported = None  # its groups hold handles, which keep trajectories in the object store
        metrics = {
            "ledger/first": float(first),
            "ledger/last": float(first + len(groups) - 1),
            **group_metrics(groups, tables, assignment),
            **trained,
            "train/learning_rate": rate,
            **{name: value for each in findings for name, value in each.probed.items()},
            **_sums([each.work for each in findings]),
            "adapter/version": float(self.iteration),
        }
        kept = (self._trained(), *([self._old.export(version=self.iteration)] if self._old else []))
        held = [adapter.digest for adapter in kept]
        self._rest()
        return Finished(metrics=metrics, digest=hashlib.sha256("".join(held).encode()).hexdigest())

    def adapter(self) -> Adapter:
        """Copy the adapter that rolls out: the trained one, or `old` for an objective that rolls out with it.

        Its version is `iteration`. During an update it is the adapter before that update.
        """
        if not self._old_rolls_out:
            return self._trained()
        old = self._update.before.old if self._update else _tensors(self._old)
        return adapter_of(old, version=self.iteration) if old else self._trained()

    def credit(self, group: int) -> Credit:
        """Return the credit of one group of the newest update, by its index."""
        return self._credits[group]

    def state(self) -> LearnerState:
        """Copy adapter, optimizer, running means and baseline; during an update, as they were before it."""
        return (self._update.before if self._update else self._snapshot()).state()

    def restore(self, state: LearnerState) -> None:
        """Continue exactly from `state`, which may be older than the learner's own.

        A fork begins with a state of iteration 0 that has an adapter only.

        Raises:
            ContractError: the run needs the adapter `old`, and the state has none.
        """
        if self._old and state.old is None and state.iteration:
            raise ContractError(
                f"objective {self._config.learner.objective} resumes with its adapter `old`, got a state without one:"
                " start a fresh run from its adapter with --fork"
            )
        self._load(
            Snapshot(
                iteration=state.iteration,
                adapter=state.adapter,
                optimizer={name: torch.tensor(array) for name, array in state.optimizer.items()},
                average=_copied(state.average or state.adapter),
                old=_copied(state.old or state.adapter),
                baseline=state.baseline,
            )
        )

    def _snapshot(self) -> Snapshot:
        """Copy what an update changes, on the device; the adapter has been exported since its own update."""
        optimizer: dict[str, torch.Tensor] = {}
        for name, parameter in self._lora.parameters.items():
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                optimizer[f"{name}/{slot}"] = value.detach().clone()
        for slot, value in self._scaler.state_dict().items():
            optimizer[f"{SCALER}/{slot}"] = torch.tensor(value, dtype=torch.float32)
        return Snapshot(
            iteration=self.iteration,
            adapter=self._trained(),
            optimizer=optimizer,
            average={name: mean.clone() for name, mean in _tensors(self._average).items()},
            old={name: old.clone() for name, old in _tensors(self._old).items()},
            baseline=_without_nan(self._baseline),
        )

    def _load(self, snapshot: Snapshot) -> None:
        """Continue from a copy of a snapshot."""
        self._update = self._exported = None
        self._wake()  # the state is loaded onto the device on which it is used
        self._lora.load(snapshot.adapter)
        moments = {
            index: {slot: snapshot.optimizer[f"{name}/{slot}"].clone() for slot in SLOTS}
            for index, name in enumerate(self._lora.parameters)
            if f"{name}/step" in snapshot.optimizer
        }
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})
        now = self._scaler.state_dict()
        scaler = {
            slot: snapshot.optimizer[f"{SCALER}/{slot}"] for slot in now if f"{SCALER}/{slot}" in snapshot.optimizer
        }
        if now and len(scaler) == len(now):
            self._scaler.load_state_dict({slot: type(now[slot])(value.item()) for slot, value in scaler.items()})
        if self._average:
            self._average.load(snapshot.average)
        if self._old:
            self._old.load(snapshot.old)
        self._baseline = _with_nan(snapshot.baseline)
        self.iteration = snapshot.iteration
        self._rest()

    @property
    def _running(self) -> Update:
        assert self._update, "`begin` comes first"
        return self._update

    def _trained(self) -> Adapter:
        """Copy the trained adapter and compute its digest; once for each version."""
        if self._update:
            return self._update.before.adapter
        self._exported = self._exported or self._lora.export(version=self.iteration)
        return self._exported

    @property
    def _keeps_idle(self) -> bool:
        """Whether pairs with an advantage of 0 train too: a KL term and the forward objectives apply to them."""
        return self._config.learner.needs_reference or self._config.is_forward

    @property
    def _old_rolls_out(self) -> bool:
        """Whether `old` rolls out with the newest version; during an update, the version before it."""
        return self._config.learner.rolls_out_old(self._update.steps_before if self._update else self._steps())

    def _wake(self) -> None:
        """Move the model back to the GPU if it rests in host memory between updates."""
        if self._config.cluster.offload:
            self._policy.backbone.wake()

    def _rest(self) -> None:
        """Free the GPU's memory until the next update, if the config asks for it."""
        if self._config.cluster.offload:
            self._policy.backbone.rest()

    def _require_own(self, groups: Sequence[ScoredGroup], *, first: int) -> None:
        """Require groups 0 to G - 1 of this iteration, in order.

        So a run learns from each of its groups once: `ledger/first` to `ledger/last` has no gap and no repetition.
        """
        held = [{(s.facts.request.iteration, s.facts.request.group) for s in group.shards} for group in groups]
        for index, own in enumerate(held, start=first):
            if own != {(self.iteration, index)}:
                raise ContractError(
                    f"iteration {self.iteration} must learn from its own groups 0 to"
                    f" {self._config.group.per_iteration - 1} in order, got (iteration, group) {sorted(own)} at index"
                    f" {index}"
                )

    def _assigned(self, groups: Sequence[ScoredGroup]) -> tuple[RewardTables, Assignment]:
        policy = self._policy
        tables = reward_tables(
            groups, members=self._config.group.size, total=policy.total_steps, strides=policy.strides
        )
        assignment = assign_credit(
            tables,
            self._config.credit,
            reward_weights=self._config.reward_weights,
            step_weights=self._step_weights,
            baseline=self._baseline,
        )
        return tables, assignment

    def _fetched(self, tasks: Sequence[ShardTask]) -> Iterator[Rollout]:
        """Yield the tasks' trajectories in order, and count the seconds of waiting for them."""
        coming = iter(self._fetch([task.shard.rollout for task in tasks]))
        while True:
            with self._host.timed("fetching"):
                rollout = next(coming, None)
            if rollout is None:
                return
            yield rollout

    def _work(self) -> dict[str, float]:
        """Return the work since the last call."""
        policy = self._policy
        self._meter.count("gradient_evaluations", policy.gradient_evaluations)
        self._meter.count("reference_evaluations", policy.evaluations - policy.gradient_evaluations)
        policy.evaluations = policy.gradient_evaluations = 0
        return self._meter.read() | self._host.read()

    def _probe(self, task: ShardTask) -> None:
        """Replay the iteration's first shard if a probe is due and the shard comes from the current adapter."""
        every = self._config.learner.probe_every
        is_own = task.shard.facts.request.adapter_version == self.iteration
        if every and self.iteration % every == 0 and is_own:
            (rollout,) = self._fetch([task.shard.rollout])
            bound, device = self._config.learner.probe_bound, self._device
            with self._lora.holding(self._old.tensors) if self._old and self._old_rolls_out else nullcontext():
                if rollout.log_probs is None:
                    self._running.probed = probe_clean(
                        self._policy, rollout, seed=self._config.seed, bound=bound, device=device
                    )
                else:
                    self._running.probed = probe_parity(self._policy, rollout, bound=bound, device=device)

    def _divisor(self, batch: MiniBatch) -> int:
        """Return the number that divides each loss before its backward: all pairs of the mini-batch.

        In float16 it is 1, and only the sum is divided, in float32: one pair's share of a mean over thousands of pairs
        has gradients below float16's smallest number.
        """
        return 1 if self._scaler.is_enabled() else batch.all_pairs

    def _add_gradients(self, task: ShardTask, rollout: Rollout, batch: MiniBatch) -> None:
        """Run every micro-batch of a shard forward and backward."""
        divisor = self._divisor(batch)
        for piece, (k, losses) in enumerate(self._losses(task, rollout, batch)):
            total = losses.loss.sum()
            self._scaler.scale(total / divisor).backward()
            order = (batch.number, task.number, piece)
            self._running.pending.append(PendingPiece(order=order, k=k, losses=losses.detached(), total=total.detach()))

    def _settle(self) -> None:
        """Copy the results of the micro-batches from the device; nothing has waited for the device before."""
        update = self._running
        for piece in update.pending:
            loss = piece.total.item()
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss of step {piece.k} must be finite, got {loss}")
            update.pieces.append(PieceStatistics.of(piece.order, piece.losses, loss))
        update.pending = []

    def _losses(self, task: ShardTask, rollout: Rollout, batch: MiniBatch) -> Iterator[tuple[int, PairLosses]]:
        """Run the objective over a shard's micro-batches; yield each one's step and losses."""
        config, device = self._config, self._device
        if self._old:
            forward = ForwardObjective(
                self._policy,
                self._lora,
                config.learner,
                self._old,
                config.credit.advantage_clip,
            )
            is_group = config.learner.objective == "dgpo"
            noised = noised_batches(task, rollout, device=device, choice=batch.choice, shares_noise=is_group)
            noised = map(forward.weighed, noised) if is_group else noised
            for piece in split_micro_batches(noised, most=self._policy.learner_batch):
                yield piece.k, forward(piece)
            return
        objective = Objective(self._policy, self._lora, config.learner)
        whole = micro_batches(
            task, rollout, rows_per_state=self._policy.rows_per_state, device=device, keeps_idle=self._keeps_idle
        )
        for piece in split_micro_batches(whole, most=self._policy.learner_batch):
            yield piece.k, objective(piece)

    def _take_step(self, gradient: Gradient, *, scale: float) -> tuple[float | None, float | None]:
        """Clip and step; return the gradient's norm before clipping and its zeros, or None if no step was taken."""
        if not gradient:
            return None, None
        for name, parameter in self._lora.parameters.items():
            held = gradient.get(name)
            parameter.grad = None if held is None else torch.tensor(held, device=parameter.device).mul_(scale)
        self._scaler.unscale_(self._optimizer)
        zeros = zero_share(self._lora.parameters)
        norm = clip_grad_norm_(self._lora.parameters.values(), self._config.learner.max_grad_norm)
        is_overflow = not torch.isfinite(norm)
        if is_overflow and self._scaler.get_scale() <= 1:
            raise NonFiniteError(f"the gradient norm must be finite, got {norm.item()}")
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        if is_overflow:
            return None, None
        if self._average:
            self._average.update(self._steps())
        return norm.item(), zeros

    def _slices(self) -> dict[str, int]:
        sizes = {name: parameter.numel() for name, parameter in self._lora.parameters.items()}
        return slice_numbers(sizes, self._seat.workers)

    def _steps(self) -> int:
        """Count the run's optimizer steps. AdamW keeps the count in its state, and so does every checkpoint."""
        return max((int(slots["step"].item()) for slots in self._optimizer.state.values()), default=0)


def _tensors(mean: AdapterMean[Any] | None) -> Mapping[str, torch.Tensor]:
    return mean.tensors if mean else {}


def _copied(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in adapter.arrays.items()}


def _without_nan(numbers: torch.Tensor | None) -> tuple[float | None, ...]:
    """Return the numbers as a state keeps them, with None for NaN."""
    return () if numbers is None else tuple(None if math.isnan(value) else value for value in numbers.tolist())


def _with_nan(numbers: Sequence[float | None]) -> torch.Tensor | None:
    """Undo `_without_nan`."""
    held = [math.nan if value is None else value for value in numbers]
    return torch.tensor(held, dtype=torch.float64) if held else None


def _sums(works: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Add up the workers' work, by name."""
    return {name: sum(work.get(name, 0.0) for work in works) for name in sorted({n for work in works for n in work})}


def _credits(tables: RewardTables, assignment: Assignment, *, version: int) -> list[Credit]:
    """Split the tables into one message for each group."""
    nothing = [None] * len(tables.rewards)
    values = nothing if assignment.values is None else assignment.values.numpy()
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
