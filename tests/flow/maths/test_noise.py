"""Noise depends on its key and on nothing else."""

import itertools

import pytest
import torch

from flow.maths.noise import INITIAL, SHARED, normal, trajectory_noise

SHAPE = (4, 8, 8)


def noise(**changes: int) -> torch.Tensor:
    key = {"seed": 1, "iteration": 2, "group": 3, "step": 4} | changes
    return trajectory_noise(**key, members=[5], shape=SHAPE)[0]


def test_equal_keys_give_equal_bits_whatever_was_drawn_between() -> None:
    first = noise()
    torch.manual_seed(99)
    torch.randn(10)
    noise(step=7)
    assert torch.equal(noise(), first)
    assert first.dtype == torch.float32


def test_noise_is_a_fixed_function_of_its_key() -> None:
    """A change of these numbers changes every run: it must be meant."""
    assert normal("rollout", 1, 2, 3, 5, 4, shape=(3,)).tolist() == pytest.approx(
        [0.661164, 0.9756195, -0.7918962], abs=1e-6
    )


@pytest.mark.parametrize(
    "changes",
    [{"seed": 2}, {"iteration": 3}, {"group": 4}, {"step": 5}, {"step": INITIAL}, {"seed": 12, "iteration": 0}],
)
def test_any_other_key_gives_other_uncorrelated_noise(changes: dict[str, int]) -> None:
    base, other = noise().flatten(), noise(**changes).flatten()
    assert not (base == other).any()
    assert torch.corrcoef(torch.stack([base, other]))[0, 1].abs().item() < 4 / 16


def test_a_member_s_noise_does_not_depend_on_the_other_members() -> None:
    key = {"seed": 1, "iteration": 2, "group": 3, "step": 0, "shape": SHAPE}
    together = trajectory_noise(**key, members=range(6))
    assert together.shape == (6, *SHAPE)
    assert torch.equal(trajectory_noise(**key, members=[4])[0], together[4])
    assert torch.equal(trajectory_noise(**key, members=range(3, 6)), together[3:])


def test_shared_noise_differs_from_every_member_s() -> None:
    key = {"seed": 1, "iteration": 2, "group": 3, "step": INITIAL, "shape": SHAPE}
    shared = trajectory_noise(**key, members=[SHARED])[0]
    assert all(not torch.equal(shared, row) for row in trajectory_noise(**key, members=range(8)))


def test_key_parts_are_kept_apart() -> None:
    assert not torch.equal(normal("a", 1, 23, shape=(4,)), normal("a", 12, 3, shape=(4,)))


def test_noise_is_standard_normal_and_members_are_uncorrelated() -> None:
    drawn = trajectory_noise(seed=0, iteration=0, group=0, members=range(64), step=0, shape=(1024,))
    assert drawn.mean().item() == pytest.approx(0, abs=4 / 256)
    assert drawn.var().item() == pytest.approx(1, abs=4 * 2**0.5 / 256)
    table = torch.corrcoef(drawn)
    worst = max(table[a, b].abs().item() for a, b in itertools.combinations(range(64), 2))
    assert worst < 5 / 32
    assert (drawn.abs() < 1).float().mean().item() == pytest.approx(0.6827, abs=0.01)
