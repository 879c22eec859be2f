"""Processes whose libraries or code differ are refused by name."""

import pytest

from flow.device import library_facts, require_same_facts
from protocol.errors import InputError


def test_the_same_installation_is_accepted():
    require_same_facts(library_facts(), library_facts(), who="one on node m2", role="rollout actors")


@pytest.mark.parametrize("name", ["torch", "diffusers", "flowcredit's code"])
def test_another_version_is_refused_with_its_node(name):
    facts = library_facts()
    with pytest.raises(
        InputError, match=rf"^all rollout actors must .* got one on node m2 with {name} other instead of"
    ):
        require_same_facts(facts, facts | {name: "other"}, who="one on node m2", role="rollout actors")
