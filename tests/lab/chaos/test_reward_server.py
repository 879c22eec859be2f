"""A reward server that answers 500 to a third of all requests: no score is lost, none is made up."""

import pytest

from tests.support.rewards.moody import moody_server
from tests.support.runs.scene import Driver, preset, require_undisturbed

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


def test_a_third_of_all_requests_failing_changes_nothing(undisturbed, tmp_path, tiny_sd3):
    with moody_server(seed=5) as (url, answered):
        far = {"scorer": "remote", "args": {"url": url, "scorer": "redness", "tries": 10}}
        path = preset(tmp_path, tiny_sd3, rewards={"redness": far})
        Driver(path, tmp_path / "run", "--local").finish()
    assert answered[500] >= 10
    require_undisturbed(tmp_path / "run", undisturbed)
