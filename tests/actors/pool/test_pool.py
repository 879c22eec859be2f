"""The pool of remote actors: work reaches an idle one, the dead are replaced, their work is re-issued."""

import asyncio
import os
import signal
import time
from concurrent.futures import Future

import psutil
import pytest
import ray
import torch

from actors.pool import pool as pool_module
from actors.pool.calls import HEARTBEAT, TURN, ActorFailedError, Alive, answer
from actors.pool.nodes import FAILURES, NodeFailures
from actors.pool.pool import ActorPool
from actors.rewards.pool import RewardPools
from protocol.config.cluster import ClusterConfig
from protocol.errors import ConfigError, ContractError, PoolError
from tests.support.runs.sinks import Silent
from tests.support.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]


@ray.remote(num_cpus=0, **HEARTBEAT)
class Counter(Alive):
    """Counts its calls; dies, hangs or fails when asked to."""

    def __init__(self) -> None:
        self._calls = 0

    def pid(self) -> int:
        return os.getpid()

    def square(self, number: int) -> int:
        self._calls += 1
        return number * number

    def die_once(self, marker: str) -> str:
        if not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return "alive"

    def hang_in(self, pid: int) -> str:
        if os.getpid() == pid:
            time.sleep(600)
        return "awake"

    def fail(self) -> None:
        raise ContractError("a rule is broken")

    def stop_once(self, marker: str) -> int:
        if not os.path.exists(marker):
            with open(marker, "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)  # The signal may reach another thread first, and this one must not answer until it has.
        return os.getpid()

    def run_out_of_time(self) -> None:
        raise TimeoutError("the scorer's own service did not answer")

    def break_device_once(self, marker: str) -> str:
        if not os.path.exists(marker):
            open(marker, "w").close()
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return "sound"

    def run_out_of_memory(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def work(self, seconds: float) -> None:
        time.sleep(seconds)

    def work_until(self, began: str, gate: str) -> None:
        open(began, "w").close()
        while not os.path.exists(gate):
            time.sleep(0.01)


@ray.remote(num_cpus=0, **HEARTBEAT)
class Unloadable(Alive):
    """Dies as on a node that lacks a library."""

    def __init__(self) -> None:
        raise ImportError("no such library")


def make_pool(size: int = 2, max_restarts: int = 3, depth: int = 1) -> ActorPool:
    return ActorPool(
        "counter",
        lambda _: Counter.remote(),
        size=size,
        max_restarts=max_restarts,
        depth=depth,
        prepare=lambda member: answer(member.handle.pid.remote(), timeout_s=60),
    )


async def pids(pool: ActorPool) -> list[int]:
    found = []

    async def ask(actor):
        found.append(await answer(actor.pid.remote(), timeout_s=60))

    await pool.on_every_member(ask)
    return found


async def test_every_call_is_answered_in_order_of_the_caller():
    pool = make_pool()
    await pool.start()
    answers = await asyncio.gather(
        *(pool.call(lambda actor, n=n: answer(actor.square.remote(n), timeout_s=60)) for n in range(20))
    )
    pool.stop()
    assert answers == [n * n for n in range(20)]


async def test_work_of_a_killed_actor_is_done_by_another(tmp_path):
    pool = make_pool(size=1)
    await pool.start()
    before = await pids(pool)
    said = await pool.call(lambda actor: answer(actor.die_once.remote(str(tmp_path / "died")), timeout_s=60))
    after = await pids(pool)
    pool.stop()
    assert (said, pool.restarts) == ("alive", 1)
    assert len(after) == 1
    assert before != after


async def test_hung_actor_is_replaced_at_its_deadline():
    pool = make_pool(size=1)
    await pool.start()
    (pid,) = await pids(pool)
    deadlines = iter((1, 60))
    said = await pool.call(lambda actor: answer(actor.hang_in.remote(pid), timeout_s=next(deadlines)))
    pool.stop()
    assert (said, pool.restarts) == ("awake", 1)


async def test_error_of_the_remote_code_comes_back_as_itself_and_costs_no_restart():
    pool = make_pool(size=1)
    await pool.start()
    with pytest.raises(ContractError, match="a rule is broken"):
        await pool.call(lambda actor: answer(actor.fail.remote(), timeout_s=60))
    with pytest.raises(TimeoutError, match="the scorer's own service"):
        await pool.call(lambda actor: answer(actor.run_out_of_time.remote(), timeout_s=60))
    squared = await pool.call(lambda actor: answer(actor.square.remote(3), timeout_s=60))
    pool.stop()
    assert (squared, pool.restarts) == (9, 0)


async def test_pool_without_restarts_left_ends_every_waiting_call(tmp_path):
    pool = make_pool(size=1, max_restarts=0)
    await pool.start()
    calls = [
        pool.call(lambda actor: answer(actor.die_once.remote(str(tmp_path / "x")), timeout_s=60)),
        pool.call(lambda actor: answer(actor.square.remote(2), timeout_s=60)),
    ]
    ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)
    pool.stop()
    assert [type(each) for each in ended] == [PoolError, PoolError]
    assert "used up its 0 restarts" in str(ended[0])


async def test_pool_whose_actors_refuse_to_begin_ends_with_their_own_error_and_without_restarts():
    pool = ActorPool(
        "counter",
        lambda _: Counter.remote(),
        size=2,
        max_restarts=3,
        prepare=lambda member: answer(member.handle.fail.remote(), timeout_s=60),
    )
    with pytest.raises(ContractError, match="a rule is broken"):
        await pool.start()
    pool.stop()
    assert pool.restarts == 0


async def test_reward_actor_whose_scorer_cannot_be_loaded_says_so_at_once(tiny_config):
    config = tiny_config(rewards={"brightness": {"scorer": "no_such_library.scorer:Brightness"}})
    pool = RewardPools(config, NodeFailures(within_s=60), Silent()).pools["brightness"]
    with pytest.raises(ConfigError, match="module 'no_such_library' .* does not exist"):
        await pool.start()
    pool.stop()
    assert pool.restarts == 0


def test_a_node_on_which_no_actor_can_start_is_named_and_counts_every_failure():
    nodes = NodeFailures(within_s=60)

    async def dies(actor):
        with pytest.raises(ActorFailedError, match=r"^it could not start on [\d.]+: ImportError: no such library$"):
            await answer(actor.ping.remote(), timeout_s=60)
        nodes.failed(actor)

    for _ in range(FAILURES):
        assert not nodes.avoided()
        asyncio.run(dies(Unloadable.remote()))
    assert nodes.avoided() == {ray.get_runtime_context().get_node_id()}


async def test_stopped_actor_is_found_by_its_silence_long_before_its_deadline_and_its_process_is_ended(tmp_path):
    marker = tmp_path / "stopped"
    pool = make_pool(size=1)
    await pool.start()
    began = time.monotonic()
    pid = await pool.call(
        lambda actor: answer(actor.stop_once.remote(str(marker)), timeout_s=600, actor=actor, heartbeat_s=2)
    )
    took = time.monotonic() - began
    pool.stop()
    stopped = int(marker.read_text())
    assert (pool.restarts, pid != stopped, took < 60) == (1, True, True)
    await until(lambda: not psutil.pid_exists(stopped))


async def test_an_actor_at_work_longer_than_a_heartbeat_is_left_alone():
    pool = make_pool(size=1)
    await pool.start()
    await pool.call(lambda actor: answer(actor.work.remote(7), timeout_s=60, actor=actor, heartbeat_s=5))
    pool.stop()
    assert pool.restarts == 0


async def test_an_actor_whose_gpu_is_in_a_broken_state_is_replaced(tmp_path):
    pool = make_pool(size=1)
    await pool.start()
    said = await pool.call(lambda actor: answer(actor.break_device_once.remote(str(tmp_path / "broken")), timeout_s=60))
    pool.stop()
    assert (said, pool.restarts) == ("sound", 1)


async def test_an_actor_without_memory_on_a_shared_gpu_tells_what_to_change():
    remedy = ClusterConfig(layout="colocated", rollout_actors=1).memory_remedy
    pool = make_pool(size=1)
    await pool.start()
    with pytest.raises(PoolError) as error:
        await pool.call(lambda actor: answer(actor.run_out_of_memory.remote(), timeout_s=60, memory_remedy=remedy))
    pool.stop()
    said = str(error.value)
    for words in ("pool counter", "cost 3 actors", "2.00 GiB", "cluster.offload=true", "cluster.layout=separate"):
        assert words in said
    assert ClusterConfig().memory_remedy == ""


async def test_a_member_whose_caller_gave_up_is_busy_until_its_call_has_ended(tmp_path):
    began, gate = tmp_path / "began", tmp_path / "gate"
    pool = make_pool(size=1)
    await pool.start()
    first = asyncio.create_task(
        pool.call(lambda actor: answer(actor.work_until.remote(str(began), str(gate)), timeout_s=60))
    )
    while not began.exists():  # noqa: ASYNC110  another process makes it
        await asyncio.sleep(0.01)
    first.cancel()
    second = asyncio.create_task(pool.call(lambda actor: answer(actor.square.remote(3), timeout_s=60)))
    for _ in range(50):
        await asyncio.sleep(0.01)
    was_waiting = pool.status().queue == 1 and not second.done()
    gate.touch()
    result = await second
    pool.stop()
    assert (was_waiting, result, pool.restarts) == (True, 9, 0)


def gated(pool: ActorPool, began, gate) -> "asyncio.Task[None]":
    return asyncio.create_task(
        pool.call(lambda actor: answer(actor.work_until.remote(str(began), str(gate)), timeout_s=60))
    )


def squares(pool: ActorPool, count: int) -> "list[asyncio.Task[int]]":
    return [
        asyncio.create_task(pool.call(lambda actor, n=n: answer(actor.square.remote(n), timeout_s=60)))
        for n in range(count)
    ]


async def until_exists(path) -> None:
    while not path.exists():  # noqa: ASYNC110  another process makes it
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("calls", "waiting"), [(1, 1), (5, 4)])
async def test_a_busy_member_holds_its_next_call_while_more_calls_wait_than_there_are_members(tmp_path, calls, waiting):
    pool = make_pool(size=1, depth=2)
    await pool.start()
    first = gated(pool, tmp_path / "began", tmp_path / "gate")
    others = squares(pool, calls)
    await until_exists(tmp_path / "began")
    held = pool.status().queue
    (tmp_path / "gate").touch()
    answers = await asyncio.gather(*others)
    await first
    status = pool.status()
    pool.stop()
    assert (held, answers, (status.busy, status.queue)) == (waiting, [n * n for n in range(calls)], (0, 0))


async def test_a_call_that_was_handed_ahead_is_not_blamed_for_the_failure_of_the_one_before_it(monkeypatch):
    monkeypatch.setattr(pool_module, "FAILURES_PER_CALL", 1)
    pool = make_pool(size=1, depth=2)
    await pool.start()
    killer = asyncio.create_task(pool.call(lambda actor: answer(actor.die.remote(), timeout_s=60)))
    others = squares(pool, 4)
    ended = await asyncio.gather(killer, *others, return_exceptions=True)
    pool.stop()
    assert isinstance(ended[0], PoolError)
    assert (ended[1:], pool.restarts) == ([0, 1, 4, 9], 1)


async def test_a_caller_of_a_call_ahead_may_give_up_and_the_member_goes_on(tmp_path):
    pool = make_pool(size=1, depth=2)
    await pool.start()
    first = gated(pool, tmp_path / "began", tmp_path / "gate")
    ahead, *others = squares(pool, 4)
    await until_exists(tmp_path / "began")
    ahead.cancel()
    await asyncio.wait({ahead})
    (tmp_path / "gate").touch()
    answers = await asyncio.gather(*others)
    await first
    status = pool.status()
    pool.stop()
    assert (ahead.cancelled(), answers, status.ready, pool.restarts) == (True, [1, 4, 9], 1, 0)


class Never:
    """The reference of a call that is never answered."""

    def future(self) -> "Future[None]":
        return Future()


async def test_the_deadline_of_a_call_ahead_begins_with_its_turn():
    turn = asyncio.get_running_loop().create_future()
    TURN.set(turn)
    call = asyncio.create_task(answer(Never(), timeout_s=0.01))
    await asyncio.wait({call}, timeout=0.3)
    was_waiting = not call.done()
    turn.set_result(None)
    with pytest.raises(ActorFailedError, match="no answer within 0.01 s"):
        await asyncio.wait_for(call, 30)
    assert was_waiting
