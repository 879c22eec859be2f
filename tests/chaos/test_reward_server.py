"""A reward server that answers 500 to a third of all requests: no score is lost, none is made up."""

import random

import pytest

from deploy.reward_service import make_app
from rewards.scorer import build_scorer
from tests.chaos.scene import Driver, preset, require_undisturbed
from tests.rewards.servers import reward_service

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_a_third_of_all_requests_failing_changes_nothing(undisturbed, tmp_path, tiny_sd3):
    from fastapi import Request, Response

    numbers = random.Random(5)
    answered = {200: 0, 500: 0}
    app = make_app({"redness": build_scorer("tests.chaos.judges:Redness")})

    @app.middleware("http")
    async def moody(request: Request, call_next) -> Response:
        if request.method == "POST" and numbers.random() < 1 / 3:
            answered[500] += 1
            return Response("not now", status_code=500)
        answered[200] += 1
        return await call_next(request)

    with reward_service(app) as url:
        far = {"scorer": "remote", "args": {"url": url, "scorer": "redness", "tries": 10}}
        path = preset(tmp_path, tiny_sd3, rewards={"redness": far})
        Driver(path, tmp_path / "run", "--local").finish()
    assert answered[500] >= 10
    require_undisturbed(tmp_path / "run", undisturbed)
