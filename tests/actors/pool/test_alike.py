"""Processes whose device model, libraries or code differ are refused by name."""

import pytest

from actors.pool.alike import require_same_facts
from flow.device import computing_facts
from protocol.errors import InputError


def test_the_same_installation_is_accepted() -> None:
    require_same_facts(computing_facts("cpu"), computing_facts("cpu"), joining="one on node m2", role="rollout actors")


@pytest.mark.parametrize("name", ["CPU", "torch", "diffusers", "flowcredit's code"])
def test_another_value_is_refused_with_its_node(name: str) -> None:
    facts = computing_facts("cpu")
    rule = rf"^all rollout actors must .* got one on node m2 with {name} other instead of"
    with pytest.raises(InputError, match=rule):
        require_same_facts(facts, facts | {name: "other"}, joining="one on node m2", role="rollout actors")


def test_every_difference_is_told_with_both_values() -> None:
    first, other = {"GPU": "NVIDIA H100", "torch": "2.9"}, {"GPU": "NVIDIA L4", "torch": "2.8"}
    with pytest.raises(InputError, match=r"got worker 1 with GPU NVIDIA L4 instead of NVIDIA H100, torch 2.8 instead"):
        require_same_facts(first, other, joining="worker 1", role="learner workers")
