"""What a step earns, in words: the text of the rule that runs, with numbers that the rule itself gives."""

import re

import pytest
import torch

from deploy.monitor.credit_words import words_of
from learner.credit.rules import calibrated, calibrated_tree, gae, gains, tree, uniform
from learner.credit.turning_point import turning_point
from protocol.config.credit import RULES, CreditConfig
from protocol.status import CreditWords


def words(rule: str, values: str = "raw", **fields: float) -> CreditWords:
    return words_of(CreditConfig.model_validate({"rule": rule, "values": values, **fields}))


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[-+]?\d+\.\d+", text.replace("−", "-"))]


def says(example: str, *values: float) -> bool:
    return all(any(abs(value - number) < 6e-4 for number in numbers(example)) for value in values)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("values", ["raw", "calibrated"])
def test_only_trees_speak_of_shared_steps_and_only_differences_are_gains(rule: str, values: str) -> None:
    text = f"{words(rule, values).rule} {words(rule, values).example}"
    assert ("share" in text) == (rule == "tree")
    assert ("gain" in text) == (rule in ("gains", "gae", "turning_point"))
    assert ("calibrated" in words(rule, values).name) == (values == "calibrated" and rule in ("gains", "gae", "tree"))


def test_the_examples_of_gains_add_up_as_the_rule_does() -> None:
    rewards = torch.tensor([[0.40, 0.55, 0.75]])
    assert says(words("gains").example, *gains(rewards)[0].tolist(), gains(rewards).sum().item())
    assert says(words("uniform").example, *uniform(rewards)[0].tolist())
    values = torch.tensor([[0.02, 0.10, 0.25]])
    assert says(words("gains", "calibrated").example, *gains(values)[0].tolist(), gains(values).sum().item())
    for decay in (0.3, 0.9):
        assert says(words("gae", gae_lambda=decay).example, *gae(rewards, decay=decay)[0].tolist())
        assert says(words("gae", "calibrated", gae_lambda=decay).example, *gae(values, decay=decay)[0].tolist())


def test_the_example_of_a_turning_point_is_what_the_rule_gives() -> None:
    rewards = torch.tensor([[[0.40, 0.30, 0.50, 0.75]]])
    explored = torch.ones(1, 1, 3, dtype=torch.bool)
    found = turning_point(rewards, explored, is_consistent=True, has_first_step=True, is_balanced=True)[0, 0]
    assert found.tolist() == pytest.approx([-0.10, 0.45, 0.25])
    assert says(words("turning_point").example, *found.tolist())


def test_the_examples_of_trees_are_what_the_rules_give() -> None:
    finals, explored = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, 1, dtype=torch.bool)
    shared, parted = torch.zeros(1, 2, 1, dtype=torch.int64), torch.tensor([[[0], [1]]])
    means, _ = tree(finals, explored, branches=shared, parents=shared)
    ends, others = tree(finals, explored, branches=parted, parents=shared)
    assert [means[0, 0, 0], *ends[0, :, 0]] == [0.5, 1.0, 0.0]
    assert says(words("tree").example + " 1.0 0.0", means[0, 0, 0].item(), 1.0, 0.0)
    # A third member with a reward of 1 makes the mean 2/3; the slope of the example is that of its iteration.
    _, slopes = calibrated_tree(ends, others, finals)
    assert slopes.shape == (1,)
    mean, slope = 0.667, 0.559
    assert says(words("tree", "calibrated").example, (1 - mean) - slope * (0 - mean), (0 - mean) - slope * (1 - mean))


def test_calibrated_values_are_relative_to_the_group() -> None:
    values, _ = calibrated(torch.tensor([[[0.2, 1.0], [0.4, 0.0]]]))
    assert values[..., -1].flatten().tolist() == pytest.approx([0.5, -0.5])
    assert "relative to the mean of the prompt's group" in words("gains", "calibrated").rule


def test_a_rule_of_the_user_is_named() -> None:
    assert words("./mine.py:rule") == CreditWords(
        name="./mine.py:rule", rule="A step earns what ./mine.py:rule returns.", example=""
    )
