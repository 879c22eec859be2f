"""The door holds every scorer to its contract; the registry explains what it cannot build; mixtures add up."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.errors import ContractError, InputError, PromptError, ScorerError
from protocol.messages import Metadata, Prompt, Scores
from rewards import scorer as scorer_module
from rewards.scorer import CheckedScorer, Registered, build_scorer, check_prompts, require_ready
from rewards.scores import mix

IMAGES = np.zeros((2, 4, 4, 3), np.uint8)


class FixedScorer:
    """Answers with whatever `answer` returns; scores lie in [0, 1]."""

    name = "fixed"
    low = 0.0
    high = 1.0

    def __init__(self, answer: Callable[[], Any]) -> None:
        self._answer = answer

    def check(self, prompts: Sequence[Prompt]) -> None:
        if any(not prompt.text for prompt in prompts):
            raise PromptError("empty prompt")

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Any:
        return self._answer()


class BrightnessScorer:
    """Mean pixel value times `gain`; without bound above."""

    name = "brightness"
    low = 0.0
    high = math.inf

    def __init__(self, *, gain: float, offset: float = 0.0) -> None:
        self._gain = float(gain)
        self._offset = offset

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Any prompt will do."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        return scores_of(*(images.mean(axis=(1, 2, 3)) * self._gain + self._offset))


class ScribblingScorer(BrightnessScorer):
    """Writes into the images that others will score."""

    def score(self, images: np.ndarray, prompts: Sequence[str], metadata: Sequence[Metadata]) -> Scores:
        images[:] = 0
        return scores_of(*images.mean(axis=(1, 2, 3)))


class HungryScorer(BrightnessScorer):
    """Needs a library that nobody has."""

    def __init__(self) -> None:
        import a_library_nobody_has  # type: ignore[import-not-found]  # noqa: F401


class NamelessScorer:
    """Lacks the range."""

    name = "nameless"

    def score(self) -> None:
        """No contract."""

    def check(self) -> None:
        """No contract."""


def scores_of(*values: float, **components: Sequence[float]) -> Scores:
    """Scores that are valid where the value is a number, with the reason "lost" elsewhere."""
    array = np.array(values, np.float32)
    valid = np.isfinite(array)
    return Scores(
        values=array,
        valid=valid,
        reasons=tuple("" if is_valid else "lost" for is_valid in valid),
        components={name: np.array(part, np.float32) for name, part in components.items()},
    )


def ask(answer: Callable[[], Any], images: np.ndarray = IMAGES) -> Scores:
    return CheckedScorer(FixedScorer(answer)).score(images, ["a", "b"], [{}, {}])


def test_sound_scores_pass_unchanged() -> None:
    given = scores_of(0.25, math.nan, strict=[1, math.nan])
    passed = ask(lambda: given)
    assert passed.values is given.values and passed.components is given.components and passed.valid is given.valid
    assert passed.reasons == given.reasons and passed.seconds > 0


def test_bounds_themselves_are_inside_the_range() -> None:
    assert ask(lambda: scores_of(0.0, 1.0)).values.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: [0.0, 1.0], "the answer must be Scores, got list"),
        (lambda: scores_of(0.5), "one score for each of 2 images, got 1"),
        (lambda: scores_of(0.5, 1.5), r"values must lie in \[0.0, 1.0\], got 1.5 for image 1"),
        (lambda: scores_of(-0.25, 0.5), r"values must lie in \[0.0, 1.0\], got -0.25 for image 0"),
        (
            lambda: Scores(values=np.array([0.5, np.nan], np.float32), valid=np.ones(2, bool), reasons=("", "")),
            "values must be finite where valid, got nan for image 1",
        ),
        (
            lambda: Scores(values=np.array([np.inf, 0.5], np.float32), valid=np.ones(2, bool), reasons=("", "")),
            "values must be finite where valid, got inf for image 0",
        ),
        (
            lambda: Scores(values=np.zeros(2, np.float32), valid=np.array([True, False]), reasons=("", "lost")),
            "values must be NaN where invalid, got 0.0 for image 1",
        ),
        (
            lambda: Scores(values=np.full(2, np.nan, np.float32), valid=np.zeros(2, bool), reasons=("lost", "")),
            "reasons must say why a score is invalid, got '' for image 1",
        ),
        (
            lambda: Scores(values=np.zeros(2, np.float32), valid=np.ones(2, bool), reasons=("", "maybe")),
            "reasons must be empty where valid, got 'maybe' for image 1",
        ),
        (
            lambda: Scores(values=np.zeros(2), valid=np.ones(2, bool), reasons=("", "")),
            "values must be a float32 array, got float64 array",
        ),
        (
            lambda: Scores(values=np.zeros(2, np.float32), valid=np.ones(2), reasons=("", "")),
            "valid must be a bool array, got float64 array",
        ),
        (lambda: scores_of(0.5, 0.5, strict=[1, np.inf]), "component strict must be finite where valid, got inf"),
        (lambda: scores_of(0.5, np.nan, strict=[1, 0]), "component strict must be NaN where invalid, got 0.0"),
        (lambda: scores_of(0.5, 0.5, strict=[1]), r"component strict must be \[2\], got \[1\]"),
    ],
)
def test_a_breach_is_caught_with_scorer_rule_and_value(answer: Callable[[], Any], message: str) -> None:
    with pytest.raises(ContractError, match=f"^scorer fixed: .*{message}"):
        ask(answer)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (IMAGES.astype(np.float32), "images must be a uint8 array, got float32"),
        (IMAGES.tolist(), "images must be a uint8 array, got list"),
        (IMAGES.transpose(0, 3, 1, 2), r"images must be .*got \[2, 3, 4, 4\]"),
        (IMAGES[0], r"images must be .*got \[4, 4, 3\]"),
        (IMAGES[:0], r"images must be .*got \[0, 4, 4, 3\]"),
        (IMAGES[:1], "prompts .*1 images, got 2"),
    ],
)
def test_wrong_input_is_stopped_at_the_door(images: Any, message: str) -> None:
    with pytest.raises(ContractError, match=f"^scorer fixed: {message}"):
        ask(lambda: scores_of(0.0, 0.0), images)


def test_one_prompt_for_all_images_is_not_guessed_at() -> None:
    door = CheckedScorer(FixedScorer(lambda: scores_of(0.0, 0.0)))
    with pytest.raises(ContractError, match="prompts .*got a single str"):
        door.score(IMAGES, "ab", [{}, {}])
    with pytest.raises(ContractError, match="metadata .*got a single dict"):
        door.score(IMAGES, ["a", "b"], {"tag": 1, "include": 2})  # type: ignore[arg-type]


HELPED = """
class Mine:
    name, low, high = "mine", 0.0, 1.0

    @staticmethod
    def check(prompts):
        pass

    def score(self, images, prompts, metadata):
        return helped(prompts)


def helped(prompts):
    return {}[prompts[0]]
"""


def test_an_exception_names_the_line_in_the_user_s_file_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "mine.py").write_text(HELPED)
    scorer = build_scorer(f"{tmp_path}/mine.py:Mine")
    for _ in range(3):
        assert (
            scorer.score(IMAGES, ["red", "red"], [{}, {}]).reasons == ("mine: KeyError: 'red' (mine.py, line 14)",) * 2
        )
    first, *others = caplog.records
    assert first.exc_info and "in helped" in scorer.failure
    said = "scorer mine raised KeyError: 'red' (mine.py, line 14): 2 of 2 images missing"
    assert first.getMessage() == said
    assert [each.getMessage() for each in others] == [f"{said} (number {number} of its kind)" for number in (2, 3)]
    assert not any(each.exc_info for each in others)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\nraise ValueError('no')", "cannot be run: ValueError: no (mine.py, line 2)"),
        ("class Mine:\n def __init__(self):\n  int('x')", "base 10: 'x' (mine.py, line 3)"),
        ("class Mine:\n def __init__(self):\n  {}['x']", "with the arguments {}: KeyError: 'x' (mine.py, line 3)"),
    ],
)
def test_a_mistake_in_the_user_s_file_names_its_line(text: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(InputError) as raised:
        build_scorer(f"{tmp_path}/mine.py:Mine")
    assert str(raised.value).endswith(line)


def test_an_exception_becomes_missing_scores_never_zero() -> None:
    def fail() -> Scores:
        raise ValueError("broken\nimage")

    scores = ask(fail)
    assert np.isnan(scores.values).all() and not scores.valid.any()
    assert {each.partition(" (")[0] for each in scores.reasons} == {"fixed: ValueError: broken image"}


@pytest.mark.parametrize(("message", "is_raised"), [("CUDA error: misaligned", True), ("CUDA out of memory", False)])
def test_what_breaks_the_gpu_is_raised_where_another_process_can_take_over(message: str, is_raised: bool) -> None:
    def fail() -> Scores:
        raise RuntimeError(message)

    scorer = CheckedScorer(FixedScorer(fail))
    for reason in scorer.score(IMAGES, ["a", "b"], [{}, {}]).reasons:
        assert reason.startswith(f"fixed: RuntimeError: {message} (test_scorer.py, line ")
    scorer.is_replaceable = True
    with pytest.raises(RuntimeError, match=message) if is_raised else nullcontext():
        assert not scorer.score(IMAGES, ["a", "b"], [{}, {}]).valid.any()


def test_an_interrupt_is_not_a_missing_score() -> None:
    def interrupt() -> Scores:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(interrupt)


def test_a_scorer_cannot_change_the_images() -> None:
    images = np.full((1, 4, 4, 3), 7, np.uint8)
    scores = CheckedScorer(ScribblingScorer(gain=1)).score(images, ["a"], [{}])
    assert "read-only" in scores.reasons[0]
    assert images.min() == 7 and images.flags.writeable


def test_check_is_passed_on() -> None:
    door = CheckedScorer(FixedScorer(lambda: None))
    door.check([Prompt(index=0, text="a")])
    with pytest.raises(PromptError, match="empty prompt"):
        door.check([Prompt(index=0, text="")])


def test_any_import_path_builds_with_its_arguments() -> None:
    scorer = build_scorer(f"{__name__}:BrightnessScorer", gain=2.0)
    assert (scorer.name, scorer.low, scorer.high) == ("brightness", 0.0, math.inf)
    images = np.full((1, 4, 4, 3), 100, np.uint8)
    assert scorer.score(images, ["a"], [{}]).values.tolist() == [200.0]


@pytest.mark.parametrize(
    ("spec", "args", "message"),
    [
        ("genevl", {}, r"got 'genevl': did you mean 'geneval'\? known: aesthetic, .*geneval"),
        ("xyz", {}, "got 'xyz': known: aesthetic, .*geneval"),
        ("a b:C", {}, "must read .*, got 'a b:C'"),
        ("rewards.genevil:GenEval", {}, r"module 'rewards\.genevil' of .* does not exist"),
        ("nowhere.at_all:Scorer", {}, "module 'nowhere' of .* does not exist"),
        ("rewards.geneval.scorer:GenEvil", {}, r"has no 'GenEvil': did you mean 'GenEval'\?"),
        ("rewards.geneval.scorer:judge", {}, "reward function judge must take images, prompts and metadata, got"),
        ("geneval", {"detectr": "x:Y"}, r"takes no argument 'detectr': did you mean 'detector'\?"),
        (f"{__name__}:BrightnessScorer", {}, "must be given its arguments, got none for gain"),
        (f"{__name__}:BrightnessScorer", {"gain": "much"}, r"does not accept the arguments \{'gain': 'much'\}"),
        (f"{__name__}:HungryScorer", {}, "'a_library_nobody_has'; install"),
        (f"{__name__}:NamelessScorer", {}, r"got NamelessScorer without \['low', 'high'\]"),
        ("geneval", {"detector": "toyworld.detektor:X"}, r"module 'toyworld\.detektor' of .* does not exist"),
    ],
)
def test_what_cannot_be_built_is_explained(spec: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_scorer(spec, **args)


class Ending(BrightnessScorer):
    """Ends the whole program with exit code 0 when it is built or asked whether it is ready; its check raises."""

    def __init__(self, ends_in: str = "__init__") -> None:
        if ends_in == "__init__":
            raise SystemExit(0)

    def check(self, prompts: Sequence[Prompt]) -> None:
        raise KeyError(prompts[0].text)

    @staticmethod
    def ready(ends_in: str = "") -> None:
        raise SystemExit(0)


def test_a_scorer_that_ends_the_program_or_raises_is_one_line_and_never_exit_code_0() -> None:
    path, prompts = f"{__name__}:Ending", [Prompt(index=0, text="a")]
    with pytest.raises(ScorerError, match=r"cannot be built with the arguments \{\}: SystemExit: 0"):
        build_scorer(path)
    with pytest.raises(ScorerError, match="Ending is not ready: SystemExit: 0"):
        require_ready(path, {})
    with pytest.raises(ScorerError, match="Ending cannot check the prompts: KeyError: 'a'"):
        check_prompts(path, {"ends_in": "check"}, prompts)


def test_a_missing_library_of_a_built_in_scorer_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scorer_module.SCORERS, "hungry", Registered(f"{__name__}:HungryScorer", "hungry"))
    with pytest.raises(ScorerError, match=r"No module named 'a_library_nobody_has'; pip install -e '\.\[hungry\]'"):
        build_scorer("hungry")


def test_a_module_that_lacks_a_library_is_not_called_missing_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hungry_module.py").write_text("import a_library_nobody_has\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ScorerError, match="hungry_module:Any .*'a_library_nobody_has'"):
        build_scorer("hungry_module:Any")


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (0.0, 0.0), (math.nan, 1.0), (None, 1.0)])
def test_a_range_must_be_two_numbers_in_order(bounds: tuple[Any, Any]) -> None:
    scorer = FixedScorer(lambda: None)
    scorer.low, scorer.high = bounds
    with pytest.raises(ScorerError, match="scorer fixed"):
        CheckedScorer(scorer)


def test_a_mixture_is_the_weighted_sum_of_raw_values() -> None:
    mixed = mix({"a": scores_of(0.5, 1.0, strict=[0, 1]), "b": scores_of(2.0, 4.0)}, {"a": 0.8, "b": 0.25})
    # 0.8 * 0.5 + 0.25 * 2 = 0.9; 0.8 * 1 + 0.25 * 4 = 1.8
    assert mixed.values == pytest.approx([0.9, 1.8])
    assert mixed.values.dtype == np.float32 and mixed.valid.all() and mixed.reasons == ("", "")
    assert {name: part.tolist() for name, part in mixed.components.items()} == {
        "a": [0.5, 1.0],
        "b": [2.0, 4.0],
        "a/strict": [0.0, 1.0],
    }


def test_a_mixture_is_valid_only_where_all_are() -> None:
    lost = Scores.missing(3, "b: dead")
    mixed = mix({"a": scores_of(0.5, math.nan, 0.25), "b": scores_of(math.nan, math.nan, 1.0)}, {"a": 1, "b": 1})
    assert mixed.valid.tolist() == [False, False, True]
    assert mixed.reasons == ("lost", "lost; lost", "")
    assert np.isnan(mixed.values[:2]).all() and mixed.values[2] == 1.25
    assert np.isnan(mixed.components["a"][:2]).all() and mixed.components["a"][2] == 0.25
    assert mix({"a": scores_of(1, 1, math.nan), "b": lost}, {"a": 1, "b": 0}).reasons == (
        "b: dead",
        "b: dead",
        "lost; b: dead",
    )


def test_a_mixture_of_one_keeps_its_value() -> None:
    assert mix({"geneval": scores_of(0.75)}, {"geneval": 1.0}).values.tolist() == [0.75]


def test_a_mixture_needs_a_weight_for_each_scorer_and_one_length() -> None:
    with pytest.raises(ContractError, match=r"weights must name the scorers \['a'\], got \['b'\]"):
        mix({"a": scores_of(1)}, {"b": 1.0})
    with pytest.raises(ContractError, match=r"weights must name the scorers \[\], got \[\]"):
        mix({}, {})
    with pytest.raises(ContractError, match=r"one length, got \{'a': 1, 'b': 2\}"):
        mix({"a": scores_of(1), "b": scores_of(1, 1)}, {"a": 1, "b": 1})
