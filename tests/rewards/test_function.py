"""A plain function is a scorer: its numbers, its missing scores and its mistakes."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import ContractError, InputError
from rewards.scorer import build_scorer, check_prompts, components_of, require_ready

IMAGES = np.stack([np.full((2, 2, 3), level, np.uint8) for level in (0, 51, 255)])


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the user's file into the working folder."""
    monkeypatch.chdir(tmp_path)
    return lambda body: (tmp_path / "mine.py").write_text(f"def bright(images, prompts, metadata, gain=1.0): {body}\n")


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("return images.mean((1, 2, 3)) / 255", [0, 0.2, 1]),
        ("return [0, None, gain]", [0, np.nan, 2]),
        ("return (True, float('nan'), 0.5)", [1, np.nan, 0.5]),
        ("import torch; return torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16, requires_grad=True)", [1, 2, 3]),
    ],
)
def test_its_numbers_are_scores_and_none_is_a_missing_one(body: str, values: list[float], write: Any) -> None:
    write(body)
    check_prompts("./mine.py:bright", {"gain": 2}, [])
    require_ready("./mine.py:bright", {"gain": 2})
    scorer = build_scorer("./mine.py:bright", gain=2)
    scores = scorer.score(IMAGES, [""] * 3, [{}] * 3)
    np.testing.assert_allclose(scores.values, values, rtol=1e-6)
    assert [bool(reason) for reason in scores.reasons] == np.isnan(values).tolist()
    assert (scorer.name, components_of("./mine.py:bright", {})) == ("bright", ())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 0.5", "one number for each of 3 images, got float"),
        ("return [1, 2]", "one number for each of 3 images, got 2"),
        ("return [1, 2, 'red']", "must return numbers, or None for no score, got 'red'"),
        ("return [[1], [2], [3]]", "must return numbers, or None for no score, got [1]"),
        ("return [1, 2, float('inf')]", "finite numbers, got infinity"),
    ],
)
def test_another_answer_breaks_the_contract_and_is_never_a_score(body: str, message: str, write: Any) -> None:
    write(body)
    with pytest.raises(ContractError, match=re.escape(message)):
        build_scorer("./mine.py:bright").score(IMAGES, [""] * 3, [{}] * 3)


def test_what_it_raises_is_a_missing_score_with_its_line(write: Any) -> None:
    write("\n    return [1 / image.mean() for image in images]")
    with np.errstate(divide="raise"):
        scores = build_scorer("./mine.py:bright").score(IMAGES, [""] * 3, [{}] * 3)
    assert scores.valid.tolist() == [False, True, True]
    assert "(mine.py, line 2)" in scores.reasons[0]


def test_a_wrong_argument_and_a_wrong_name_are_one_line(write: Any) -> None:
    write("return [1, 2, 3]")
    with pytest.raises(InputError, match=r"takes no argument 'gian': did you mean 'gain'\?"):
        check_prompts("./mine.py:bright", {"gian": 2}, [])
    with pytest.raises(InputError, match=r"has no 'brigth': did you mean 'bright'\?"):
        check_prompts("./mine.py:brigth", {}, [])
