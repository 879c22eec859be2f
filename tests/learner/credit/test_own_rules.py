"""A credit rule of the user's own: found by its path, given each window's points, and refused where it is wrong."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.credit.normalisers import joint
from learner.credit.rules import gains, require_rule, step_rewards
from learner.credit.tables import RewardTables
from protocol.config.credit import RULES, CreditConfig, RuleNeeds, needs_of
from protocol.config.parse import parse_config
from protocol.errors import ConfigError, ContractError
from tests.support.learning.worked_group import REWARDS
from tests.support.paths import ROOT

LATE = """
import torch

def late(rewards):
    steps = torch.zeros(len(rewards), rewards.shape[1] - 1, dtype=torch.float64)
    steps[:, -1] = rewards[:, -1]
    return steps

late.needs_points = False
"""
GAINS = "def mine(rewards):\n    return rewards[:, 1:] - rewards[:, :-1]\n"


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the user's file into the working folder."""
    monkeypatch.chdir(tmp_path)
    return lambda text: (tmp_path / "mine.py").write_text(text)


def tables_of(rewards: torch.Tensor, explored: torch.Tensor) -> RewardTables:
    numbers = torch.arange(rewards.shape[1]).view(1, -1, 1).expand(explored.shape)
    return RewardTables(rewards=rewards, scores={}, explored=explored, branches=numbers, parents=numbers)


def earned(path: str, rewards: torch.Tensor = REWARDS[None], **credit: Any) -> torch.Tensor:
    explored = torch.ones(*rewards.shape[:2], rewards.shape[2] - 1, dtype=torch.bool)
    explored[:, 0, 1] = False
    return step_rewards(tables_of(rewards, explored), CreditConfig(rule=path, **credit)).step_rewards


def test_it_is_given_the_points_of_each_window_like_a_built_in_rule(write: Any) -> None:
    write(GAINS)
    for values in ("raw", "calibrated"):
        own, built_in = (earned(rule, values=values) for rule in ("./mine.py:mine", "gains"))
        assert torch.equal(own.nan_to_num(), built_in.nan_to_num())
        assert own[0, 0].isnan().tolist() == [False, True, False, False]


def test_a_rule_of_finished_images_gets_rewards_and_needs_no_points(write: Any) -> None:
    write(LATE)
    assert needs_of("./mine.py:late") == RuleNeeds(needs_points=False, uses_values=False)
    nan = torch.nan
    finals = torch.tensor([[[nan, nan, 0.3], [nan, nan, nan]]])
    explored = torch.ones(1, 2, 2, dtype=torch.bool)
    steps = step_rewards(tables_of(finals, explored), CreditConfig(rule="./mine.py:late")).step_rewards
    torch.testing.assert_close(steps, torch.tensor([[[0.0, 0.3], [0.0, nan]]]), equal_nan=True)
    assert joint(steps[0], epsilon=0.0)[1, 1] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(rewards): pass", "has no 'mine': known: other"),
        ("class mine: pass", "has a type, not a function, named 'mine'"),
        ("def mine(rewards): return rewards", "must return step rewards [3, 3]"),
        ("def mine(rewards): return rewards[:, 1:].long()", "got torch.int64 [3, 3]"),
        ("def mine(rewards): return None", "got NoneType"),
        ("def mine(rewards): return rewards[:, 1:] / 0", "or NaN for a missing one, got infinity"),
        ("def mine(rewards):\n    return rewards.red", "mine.py, line 2"),
        ("def mine(rewards): return rewards[:, 1:] - rewards[:, 1:].nanmean(0)", "mine.needs_iteration = True"),
        ("import nothing_here", "cannot be imported: ModuleNotFoundError"),
        ("import torch\ndef mine(rewards): return torch.rand(len(rewards), rewards.shape[1] - 1)", "take chance out"),
        (GAINS + "mine.needs_points = 'no'", "needs_points of credit.rule ./mine.py:mine must be True or False"),
    ],
)
def test_a_wrong_rule_is_one_line_before_the_run(text: str, message: str, write: Any) -> None:
    write(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        require_rule(CreditConfig(rule="./mine.py:mine"))
    assert "\n" not in str(raised.value)


def test_a_rule_that_compares_trajectories_says_so_and_waits_for_the_iteration(write: Any) -> None:
    write("def mine(rewards): return rewards[:, 1:] - rewards[:, 1:].nanmean(0)\nmine.needs_iteration = True\n")
    require_rule(CreditConfig(rule="./mine.py:mine"))
    tree = {"iterations": 1, "model": {"path": "m"}, "data": {"train": "t", "heldout": "h"}}
    tree["rewards"] = {"a": {"scorer": "geneval"}}
    credit = {"values": "raw", "scale": "prompt"}
    own, built_in = (parse_config(tree | {"credit": credit | {"rule": rule}}) for rule in ("./mine.py:mine", "gains"))
    assert own.scores_points and built_in.scores_points
    assert (own.credits_groups_alone, built_in.credits_groups_alone) == (False, True)


def test_a_rule_that_turns_wrong_later_does_not_train(write: Any) -> None:
    write("def mine(rewards): return rewards[:, 1:] if rewards.shape[1] < 5 else rewards\n")
    require_rule(CreditConfig(rule="./mine.py:mine"))
    with pytest.raises(ContractError, match=r"must return step rewards \[2, 4\]"):
        earned("./mine.py:mine")


def test_a_config_is_read_without_the_file_and_an_unknown_name_is_refused() -> None:
    assert CreditConfig(rule="./nowhere.py:mine").rule == "./nowhere.py:mine"
    with pytest.raises(ValueError, match=r"credit.rule must be one of .* got 'gain': did you mean 'gains'"):
        CreditConfig(rule="gain")


def test_every_built_in_rule_says_what_it_needs_and_stands_on_the_page() -> None:
    page = (ROOT / "docs" / "method" / "credit.md").read_text()
    explored = torch.ones(1, 3, 4, dtype=torch.bool)
    for rule, needs in RULES.items():
        assert f"`{rule}`" in page
        rewards = REWARDS[None].clone()
        if not needs.needs_points:
            rewards[..., :-1] = torch.nan
        found = step_rewards(tables_of(rewards, explored), CreditConfig(rule=rule))
        assert found.step_rewards.isfinite().all(), rule
        assert (found.slopes is not None) == needs.uses_values
    assert torch.equal(earned("gains", values="raw")[0, 1], gains(REWARDS)[1])
