"""What the status says of a learner worker whose call has ended with an error."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.learners import RemoteWorker
from actors.pool.calls import Member
from learner.update.learner import Learner
from protocol.errors import ContractError, LearnerFailedError


class Ended:
    """A remote call that ended with an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def future(self) -> "Future[None]":
        ended: Future[None] = Future()
        ended.set_exception(self._error)
        return ended


@pytest.mark.parametrize(
    ("error", "raised", "state"),
    [(ContractError("a rule is broken"), ContractError, "idle"), (RayActorError(), LearnerFailedError, "busy")],
)
async def test_a_learner_is_idle_after_an_error_that_did_not_end_it(tiny_config, error, raised, state):
    call: Any = Ended(error)
    method = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: call))
    member = Member(0, handle=SimpleNamespace(call=method))
    with pytest.raises(raised):
        await RemoteWorker(tiny_config(), member).call(Learner.begin)
    assert member.state == state
