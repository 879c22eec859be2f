"""How a role computes on a GPU; and processes whose libraries or code differ are refused by name."""

import os

import pytest
import torch

from flow.device import computing, library_facts, require_same_facts
from protocol.config.cluster import RoleConfig
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


def kernels() -> tuple[bool, bool, str | None]:
    """Whether torch insists on deterministic kernels, whether it only warns, and cuBLAS' workspace."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_a_role_with_a_gpu_insists_on_deterministic_kernels_and_a_scorer_beside_it_need_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With torch's `warn_only` the backward of attention would still differ from time to time."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    before, threads = kernels(), torch.get_num_threads()
    with computing(RoleConfig(gpus=0.5, threads=threads + 1)):
        assert kernels() == (True, False, ":4096:8")
        assert torch.get_num_threads() == threads + 1
    assert kernels()[:2] == before[:2]
    assert torch.get_num_threads() == threads


def test_a_role_without_a_gpu_leaves_the_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    with computing(RoleConfig()):
        assert kernels() == (False, False, None)
