"""A trajectory's record: rewards of the images that are shown, credit of the steps that were stochastic."""

from pathlib import Path

import numpy as np
import pytest

from deploy.monitor.trajectories import FILES_KEPT, read_records, record_of, write_record
from protocol.messages import Credit, Excerpt, Prompt, ShardRequest
from tests.support.runs.statuses import a_record

NAN = float("nan")


@pytest.mark.parametrize("is_calibrated", [True, False])
@pytest.mark.parametrize(
    ("points", "rewards", "shown"),
    [(3, [NAN, 0.2, NAN, 0.5, 0.7], [0.2, 0.5, 0.7]), (1, [NAN, NAN, NAN, NAN, 0.7], [0.7])],
    ids=["all points", "final images only"],
)
def test_rewards_and_values_stand_under_their_own_images(
    points: int, rewards: list[float], shown: list[float], is_calibrated: bool
) -> None:
    """Steps 1 and 3 of four were stochastic."""
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text="a"),
        first_member=0,
        members=1,
        adapter_version=0,
        adapter_digest="",
    )
    excerpt = Excerpt(request=request, steps=(1, 3), images=np.zeros((1, points, 2, 2, 3), np.uint8))
    credit = Credit(
        adapter_version=1,
        rewards=np.array([rewards]),
        values=2 * np.array([rewards]) if is_calibrated else None,
        step_rewards=np.array([[NAN, 0.3, NAN, 0.2]]),
        advantages=np.array([[0.0, 1.0, 0.0, -1.0]]),
    )
    (trajectory,) = record_of(1, excerpt, credit).trajectories
    assert trajectory.rewards == shown
    assert trajectory.values == (pytest.approx([2 * reward for reward in shown]) if is_calibrated else None)
    assert (trajectory.step_rewards, trajectory.advantages) == ([0.3, 0.2], [1.0, -1.0])


def test_members_of_a_tree_that_share_a_step_have_its_credit_and_a_missing_score_has_none() -> None:
    """Members 0 to 2 share step 0, and each has its own step 1; member 1 has no score, nor has member 3, alone."""
    request = ShardRequest(
        iteration=0,
        group=0,
        prompt=Prompt(index=0, text="a"),
        first_member=0,
        members=4,
        adapter_version=0,
        adapter_digest="",
    )
    excerpt = Excerpt(request=request, steps=(0, 1), images=np.zeros((4, 3, 2, 2, 3), np.uint8), skipped=(0, 1))
    step_rewards = np.array([[0.5, 0.1], [NAN, NAN], [NAN, 0.3], [NAN, NAN]])
    credit = Credit(
        adapter_version=1,
        rewards=np.array([[NAN, NAN, final] for final in (0.4, NAN, 0.6, NAN)]),
        values=None,
        step_rewards=step_rewards,
        advantages=np.array([[2.0, 1.0], [0.0, 0.0], [0.0, 3.0], [0.0, 0.0]]),
    )
    shown = record_of(1, excerpt, credit).trajectories
    assert [each.rewards for each in shown] == [[None, None, final] for final in (0.4, None, 0.6, None)]
    assert [each.step_rewards for each in shown] == [[0.5, 0.1], [None, None], [0.5, 0.3], [None, None]]
    assert [each.advantages for each in shown] == [[2.0, 1.0], [0.0, 0.0], [2.0, 3.0], [0.0, 0.0]]
    assert np.isnan(step_rewards[2, 0]), "the learner's credit stays as it is"


def test_the_newest_records_stay_beyond_a_million_iterations(tmp_path: Path) -> None:
    iterations = range(999_990, 1_000_040, 2)
    for iteration in iterations:
        write_record(tmp_path, a_record(iteration))
    assert [record.iteration for record in read_records(tmp_path)] == [*iterations][-FILES_KEPT:]
