"""An objective of the user's own: it trains like a built-in one, and is refused where it is wrong."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.update.objective import clipped_surrogate
from learner.update.own import PolicyStep, own_loss, require_objective
from protocol.config.learning import LearnerConfig
from protocol.errors import ConfigError

OWN = LearnerConfig(objective="./mine.py:loss")


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the user's file into the working folder."""
    monkeypatch.chdir(tmp_path)
    return lambda body: (tmp_path / "mine.py").write_text(
        f"import torch\n\ndef loss(log_ratio, advantages, step): {body}\n"
    )


def test_it_is_given_what_the_built_in_objectives_take(write: Any) -> None:
    write(
        "\n    ratio, c = log_ratio.exp(), step.config.clip_range"
        "\n    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - c, 1 + c))"
    )
    require_objective(OWN)
    log_ratio, advantages = torch.tensor([0.0, 0.2, -0.3]), torch.tensor([1.0, 2.0, -1.0])
    mean = torch.zeros(3, 1, 1, 1)
    step = PolicyStep(k=1, step_size=0.1, mean=mean, std=torch.ones(3), next_latents=mean, config=OWN)
    expected, _ = clipped_surrogate(log_ratio, advantages=advantages, clip_range=OWN.clip_range)
    assert torch.equal(own_loss(OWN.objective, log_ratio, advantages, step), expected)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return (-advantages * log_ratio.exp()).mean()", "a loss for each pair, floats [4], got torch.float32 []"),
        ("return 0.0", "a loss for each pair, floats [4], got float"),
        ("return -advantages", "a loss with a gradient, got one without"),
        ("return -advantages * log_ratio / 0", "finite losses with finite gradients"),
        ("return -advantages * log_ratio * torch.rand(len(advantages))", "take chance out"),
        ("return -(advantages - advantages.mean()) * log_ratio", "the same loss alone and among others"),
        ("\n    return step.red", "must not fail, got AttributeError: 'PolicyStep' object has no attribute 'red'"),
        ("\n    return step.red", "(mine.py, line 4)"),
    ],
)
def test_a_wrong_objective_is_one_line_before_the_run(body: str, message: str, write: Any) -> None:
    write(body)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        require_objective(OWN)
    assert "\n" not in str(raised.value)


def test_an_unknown_objective_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"learner.objective must be one of .* got 'cliped': did you mean 'clipped'"):
        LearnerConfig(objective="cliped")
