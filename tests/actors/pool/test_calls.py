"""A dead actor's reason is one short line; Ray's long text stays in the log."""

import asyncio
import logging
import os
import signal
from concurrent.futures import Future

import pytest
import ray
from ray.exceptions import ActorUnavailableError, NodeDiedError, ObjectLostError, OutOfMemoryError, RayActorError

from actors.pool.calls import ActorFailedError, answer, death
from protocol.errors import ShardLostError

HEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tpid: 17\n\tip: 10.0.0.2\nThe actor "
EXIT = "is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
LONG = "connection error code 2. Common causes include: (1) the OOM killer, (2) ray stop --force, or (3) SIGSEGV"
NO_POWER = "RpcError: RPC Error message: keepalive watchdog timeout; RPC Error details: rpc_code: 14"
MEMORY = "Task was killed due to the node running low on memory.\nMemory on the node where the task was running"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            RayActorError(error_msg=HEAD + EXIT + LONG),
            "its process 17 on 10.0.0.2 died (SYSTEM_ERROR): it crashed or was killed, perhaps because its node ran out"
            " of memory",
        ),
        (
            RayActorError(error_msg=HEAD + EXIT + "Worker exits with an exit code 3."),
            "its process 17 on 10.0.0.2 died (SYSTEM_ERROR): exit code 3",
        ),
        (
            RayActorError(error_msg=HEAD + "is dead because it was killed by `ray.kill`."),
            "`ray.kill` ended its process 17 on 10.0.0.2",
        ),
        (RayActorError(error_msg=HEAD + "died because its node has died. Node Id: ab"), "its node died: 10.0.0.2"),
        (NodeDiedError("gone"), "its node died"),
        (
            OutOfMemoryError(MEMORY + " was 7.6GB / 7.8GB (0.97), which exceeds the memory usage threshold of 0.95."),
            "Ray ended it because its node ran out of memory (7.6GB / 7.8GB)",
        ),
        (RayActorError(error_msg="something\nnew"), "something new"),
        (ActorUnavailableError(NO_POWER, None), "its node does not answer"),
        (RayActorError(error_msg=HEAD + "is unreachable. " + NO_POWER), "its node does not answer: 10.0.0.2"),
    ],
)
def test_ray_s_text_about_a_dead_actor_becomes_one_short_line(error: Exception, line: str) -> None:
    assert death(error) == line


def test_data_that_went_with_its_node_are_told_in_our_words() -> None:
    class Reference:
        def future(self) -> Future[None]:
            (found := Future()).set_exception(ObjectLostError("ab" * 14, b"", "call site"))
            return found

    with pytest.raises(ShardLostError, match="^the node that held its data is gone$"):
        asyncio.run(answer(Reference(), timeout_s=60))  # pyrefly: ignore[bad-argument-type]


@ray.remote(num_cpus=0)
class Mortal:
    """Dies when it is told to."""

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_the_log_keeps_ray_s_text_of_a_killed_actor(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def ask() -> None:
        actor = Mortal.remote()
        await answer(actor.die.remote(), timeout_s=60)

    line = r"^its process \d+ on \S+ died \(SYSTEM_ERROR\): it crashed or was killed"
    with pytest.raises(ActorFailedError, match=line):
        asyncio.run(ask())
    (told,) = [record for record in caplog.records if "Ray says" in record.message]
    assert "Worker exit detail" in told.getMessage() and told.levelno == logging.INFO
