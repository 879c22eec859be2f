"""One learner worker: the Ray shell of `learner.update.learner.Learner`, and `RemoteWorker`, which calls it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import ray
import torch

from actors.pool.calls import HEARTBEAT, ActorFailedError, Alive, answer
from actors.pool.member import ActorHandle, Member
from flow.device import compute_deterministically, computing_facts, device_of
from learner.update.lanes import Gradient, Seat, added
from learner.update.learner import Findings, Finished, Learner
from learner.update.workers import FindingsHandle, GradientHandle, GroupsHandle
from protocol.config.run import RunConfig
from protocol.errors import LearnerFailedError
from protocol.messages import Adapter, Credit, LearnerState, Rollout, ScoredGroup


@ray.remote(**HEARTBEAT)
class LearnerActor(Alive):
    """One worker of the learner group. It takes one call at a time; the caller ends a call at its deadline."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._fetched = 0
        torch.set_num_threads(config.cluster.learner.threads)

    @ray.method
    def prepare(self) -> dict[str, str]:
        """Load the model and return what the bits depend on; the constructor would hide the user's mistakes."""
        device = device_of(self._config.cluster.learner)
        compute_deterministically(device)
        self._learner = Learner(self._config, device=device, fetch=self._fetch)
        return computing_facts(device)

    @ray.method
    def sit(self, seat: Seat) -> None:
        """Take the lanes of this seat."""
        self._learner.sit(seat)

    @ray.method
    def begin(self) -> None:
        """Begin the update of an iteration."""
        self._fetched = 0
        self._learner.begin()

    @ray.method
    def feed(self, groups: Sequence[ScoredGroup]) -> None:
        """Take the next groups of the iteration; their trajectories stay where they are."""
        self._learner.feed(groups)

    @ray.method
    def train(self, first: int, count: int, epoch: int) -> None:
        """Fetch this worker's shards, one ahead, and add their gradients to its lanes."""
        self._learner.train(first, count, epoch=epoch)

    @ray.method(num_returns=2)
    def lane_sum(self) -> tuple[None, Gradient]:
        """Add up the worker's lanes; the sum stays in the object store."""
        return None, self._learner.lane_sum()

    @ray.method(num_returns=2)
    def added(self, one: Gradient, other: Gradient) -> tuple[None, Gradient]:
        """Add two gradients; the sum stays in the object store."""
        return None, added(one, other)

    @ray.method
    def step(self, gradient: Gradient, first: int, epoch: int) -> None:
        """Take an optimizer step."""
        self._learner.step(gradient, first=first, epoch=epoch)

    @ray.method(num_returns=2)
    def findings(self) -> tuple[int, Findings]:
        """Return the bytes that this update fetched, and what it showed."""
        return self._fetched, self._learner.findings()

    @ray.method
    def finish(self, *findings: Findings) -> Finished:
        """End the update with the findings of all workers."""
        return self._learner.finish(findings)

    @ray.method
    def adapter(self) -> Adapter:
        """Copy the adapter that rolls out next."""
        return self._learner.adapter()

    @ray.method
    def credit(self, group: int) -> Credit:
        """Tell the credit of one group of the newest update."""
        return self._learner.credit(group)

    @ray.method
    def state(self) -> LearnerState:
        """Copy everything that is needed to resume exactly."""
        return self._learner.state()

    @ray.method
    def restore(self, state: LearnerState) -> None:
        """Resume from a saved state."""
        self._learner.restore(state)

    def _fetch(self, handles: Sequence[Any]) -> Iterator[Rollout]:
        """Fetch trajectories in order, the next ones while the caller works on those before."""
        with ThreadPoolExecutor(1, thread_name_prefix="fetch") as thread:
            coming = thread.submit(ray.get, handles[0]) if handles else None
            for following in [*handles[1:], None]:
                if coming is None:
                    return
                rollout = cast(Rollout, coming.result())
                coming = None if following is None else thread.submit(ray.get, following)
                arrays = (rollout.latents, rollout.log_probs, rollout.means, rollout.targets)
                self._fetched += sum(array.nbytes for array in arrays if array is not None)
                yield rollout


class RemoteWorker:
    """A `learner.update.workers.Worker` on Ray. Sums and findings are references into the object store."""

    def __init__(self, config: RunConfig, actor: ActorHandle, member: Member) -> None:
        self._role = config.cluster.learner
        self._heartbeat_s = config.cluster.heartbeat_s
        self._memory_remedy = config.cluster.memory_remedy
        self.actor = actor
        self.member = member
        self.has_failed = False
        self.busy_s = 0.0
        """Seconds in calls so far."""
        self.reduction_s = 0.0
        """Those of them that added gradients."""
        self.fetched = 0
        """Bytes of trajectories that the newest update fetched."""

    async def begin(self) -> None:
        """Begin the update of an iteration."""
        await self.call(self.actor.begin.remote())

    async def feed(self, groups: GroupsHandle) -> None:
        """Take the next groups of the iteration."""
        await self.call(self.actor.feed.remote(groups))

    async def train(self, first: int, count: int, *, epoch: int) -> None:
        """Add the gradients of this worker's shards to its lanes."""
        await self.call(self.actor.train.remote(first, count, epoch))

    async def lane_sum(self) -> GradientHandle:
        """Add up this worker's lanes."""
        done, gradient = self.actor.lane_sum.remote()
        return await self._reduce(done, gradient)

    async def added(self, one: GradientHandle, other: GradientHandle) -> GradientHandle:
        """Add two gradients."""
        done, gradient = self.actor.added.remote(one, other)
        return await self._reduce(done, gradient)

    async def step(self, gradient: GradientHandle, *, first: int, epoch: int) -> None:
        """Take an optimizer step."""
        await self.call(self.actor.step.remote(gradient, first, epoch))

    async def findings(self) -> FindingsHandle:
        """Return what the update showed on this worker's shards."""
        fetched, findings = self.actor.findings.remote()
        self.fetched = await self.call(fetched)
        return cast(FindingsHandle, findings)

    async def finish(self, findings: Sequence[FindingsHandle]) -> Finished:
        """End the update."""
        return await self.call(self.actor.finish.remote(*findings))

    async def call(self, reference: "ray.ObjectRef[Any]") -> Any:
        """Wait for a call that counts as work.

        Raises:
            LearnerFailedError: the actor died, hangs, or gave no answer in time.
        """
        self.member.begin()
        try:
            result = await self.answer(reference)
        except LearnerFailedError:
            raise
        except Exception:  # the actor answered with an error and takes the next call
            self.busy_s += self.member.end()
            raise
        self.busy_s += self.member.end()
        return result

    async def answer(self, reference: "ray.ObjectRef[Any]") -> Any:
        """Wait for a call."""
        timeout_s = self._role.timeout_s
        try:
            return await answer(
                reference,
                timeout_s=timeout_s,
                actor=self.actor,
                heartbeat_s=self._heartbeat_s,
                memory_remedy=self._memory_remedy,
            )
        except ActorFailedError as error:
            raise self.failed(error) from error

    def failed(self, error: object) -> LearnerFailedError:
        """Note that the actor is dead or useless, and return the exception that says so."""
        self.has_failed = True
        return LearnerFailedError(f"learner worker {self.member.slot} failed: {error}")

    async def _reduce(self, done: "ray.ObjectRef[Any]", gradient: Any) -> GradientHandle:
        before = self.busy_s
        await self.call(done)
        self.reduction_s += self.busy_s - before
        return cast(GradientHandle, gradient)
