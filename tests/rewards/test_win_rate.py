"""Win rates of a group: worked numbers, comparisons that fail, judges that prefer the first, a judge over HTTP."""

import base64
import json
import math
from typing import Any

import numpy as np
import pytest

from protocol.config.parse import parse_config
from protocol.config.reward import RewardConfig
from protocol.errors import ConfigError, ContractError, ScorerError
from protocol.messages import Metadata, Scores
from rewards.images import decode_image
from rewards.scorer import build_scorer, scorer_of
from tests.support.rewards.reward_servers import Answer, Asked, http_server

LEVELS = (30, 10, 20, 20)
GROUP = np.stack([np.full((4, 4, 3), level, np.uint8) for level in LEVELS])


class Brighter:
    """The brighter image wins; `bias` is added to the share of the first one; pairs with `lost` have no answer."""

    def __init__(self, *, bias: float = 0.0, lost: int = -1, raises: bool = False) -> None:
        self._bias, self._lost, self._raises = bias, lost, raises

    def compare(self, first: np.ndarray, second: np.ndarray, prompt: str, metadata: Metadata) -> tuple[float, str]:
        one, other = int(first[0, 0, 0]), int(second[0, 0, 0])
        if self._lost in (one, other):
            if self._raises:
                raise ConnectionError("down")
            return math.nan, "the judge is silent"
        share = 0.5 if one == other else float(one > other)
        return min(1.0, share + self._bias), ""


def rated(images: np.ndarray = GROUP, **settings: Any) -> Scores:
    orders = {name: settings.pop(name) for name in ("both_orders", "parallel") if name in settings}
    scorer = build_scorer("win_rate", compare=f"{__name__}:Brighter", settings=settings, **orders)
    return scorer.score(images, ["a cat"] * len(images), [{}] * len(images))


@pytest.mark.parametrize("both_orders", [True, False])
def test_an_image_s_score_is_its_mean_share(*, both_orders: bool) -> None:
    """30 beats all; 10 loses all; the two of 20 beat 10, lose to 30 and tie."""
    scores = rated(both_orders=both_orders, parallel=1)
    assert scores.values.tolist() == [1.0, 0.0, 0.5, 0.5]
    assert scores.components["comparisons"].tolist() == [3.0] * 4
    assert scores.values.mean() == 0.5


def test_a_judge_that_always_prefers_the_first_says_nothing_when_asked_in_both_orders() -> None:
    assert rated(bias=1.0).values.tolist() == [0.5] * 4
    always = rated(images=np.repeat(GROUP[:1], 3, axis=0), bias=1.0)
    assert always.values.tolist() == [0.5] * 3
    assert rated(images=np.repeat(GROUP[:1], 3, axis=0), bias=1.0, both_orders=False).values.tolist() == [1, 0.5, 0]


@pytest.mark.parametrize("raises", [False, True])
def test_a_failed_comparison_counts_for_neither_and_an_image_without_any_is_missing(*, raises: bool) -> None:
    scores = rated(lost=10, raises=raises)
    assert scores.valid.tolist() == [True, False, True, True]
    np.testing.assert_array_equal(scores.values, np.array([1, np.nan, 0.25, 0.25], np.float32))
    assert scores.reasons[1] == ("ConnectionError: down" if raises else "the judge is silent")
    assert scores.components["comparisons"][0] == 2.0
    everyone = rated(images=GROUP[2:], lost=20, raises=raises)
    assert not everyone.valid.any()
    assert np.isnan(everyone.values).all()


class Speechless(Brighter):
    """Its share is None where there is no answer."""

    def compare(self, first: np.ndarray, second: np.ndarray, prompt: str, metadata: Metadata) -> Any:
        share, reason = super().compare(first, second, prompt, metadata)
        return None if reason else share, reason


@pytest.mark.parametrize("both_orders", [True, False])
def test_the_share_of_a_comparison_without_an_answer_does_not_matter(*, both_orders: bool) -> None:
    scorer = build_scorer("win_rate", compare=f"{__name__}:Speechless", settings={"lost": 10}, both_orders=both_orders)
    scores = scorer.score(GROUP, ["a cat"] * 4, [{}] * 4)
    assert scores.valid.tolist() == [True, False, True, True]
    assert scores.values[[0, 2, 3]].tolist() == [1.0, 0.25, 0.25]
    assert scores.reasons[1] == "the judge is silent"


def test_a_lonely_image_is_missing() -> None:
    assert rated(images=GROUP[:1]).reasons == ("it has no other image in its group",)


def test_images_of_two_prompts_are_no_group_and_a_share_has_its_range() -> None:
    scorer = build_scorer("win_rate", compare=f"{__name__}:Brighter")
    with pytest.raises(ContractError, match="must belong to one group, got 2 prompts"):
        scorer.score(GROUP, ["a cat", "a cat", "a dog", "a dog"], [{}] * 4)
    with pytest.raises(ContractError, match=r"a share must lie in \[0, 1\], got -1"):
        rated(bias=-1.0)


class Dead:
    """A group's scorer that raises, whatever part of a group it sees."""

    name, low, high, sees = "dead", 0.0, 1.0, "group"

    def __init__(self) -> None:
        self.calls: list[int] = []

    @staticmethod
    def check(prompts: object) -> None:
        """Any prompt."""

    def score(self, images: np.ndarray, prompts: object, metadata: object) -> Scores:
        self.calls.append(len(images))
        raise OSError("no disk")


def test_a_group_is_never_scored_in_parts() -> None:
    from rewards.scorer import CheckedScorer

    dead = Dead()
    scores = CheckedScorer(dead).score(GROUP, ["a"] * 4, [{}] * 4)
    assert dead.calls == [4]
    (reason,) = set(scores.reasons)
    assert reason.startswith("dead: OSError: no disk (test_win_rate.py, line ")


def test_what_a_scorer_sees_must_be_what_the_config_says() -> None:
    args = {"compare": f"{__name__}:Brighter"}
    assert scorer_of(RewardConfig(scorer="win_rate", args=args, sees="group")).sees == "group"
    with pytest.raises(ScorerError, match="must be what it declares, 'group', got 'image'"):
        scorer_of(RewardConfig(scorer="win_rate", args=args))
    for wrong, message in (({"compare": "pathlib:PurePath"}, "a method `compare`"), ({"parallel": 0}, "at least 1")):
        with pytest.raises(ScorerError, match=message):
            build_scorer("win_rate", **args | wrong)


WINS = {"scorer": "win_rate", "sees": "group", "args": {"compare": "a:B"}}
OTHER = {"scorer": "geneval"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rewards": {"wins": WINS}}, "at least one of rewards must have use=train and sees=image"),
        (
            {"rewards": {"wins": WINS | {"use": "evaluate"}, "o": OTHER}, "evaluation": {"images_per_prompt": 1}},
            "evaluation.images_per_prompt must be at least 2, got 1: rewards.wins compares",
        ),
        (
            {"rewards": {"wins": WINS | {"use": "evaluate"}, "o": OTHER}, "evaluation": {"images_per_prompt": 5}},
            "evaluation.batch must be a multiple of evaluation.images_per_prompt 5, got 48: .*; take 45",
        ),
        (
            {
                "rewards": {"wins": WINS | {"use": "evaluate"}, "o": OTHER},
                "evaluation": {"images_per_prompt": 8, "batch": 4},
            },
            "got 4: rewards.wins sees all images of a prompt; take 8",
        ),
        (
            {"group": {"size": 4, "shard": 2}},
            "group.shard must be group.size 4, got 2: rewards.wins sees a whole group",
        ),
        ({"credit": {"rule": "gains"}}, "needs a method that scores finished images once, got credit.rule 'gains'"),
    ],
)
def test_a_config_that_has_no_whole_groups_is_refused(sections: dict[str, Any], message: str) -> None:
    tree = {
        "iterations": 1,
        "model": {"path": "m"},
        "data": {"train": "a", "heldout": "b"},
        "credit": {"rule": "uniform"},
        "rewards": {"wins": WINS, "o": OTHER | {"weight": 0.0}},
    }
    assert parse_config(tree).evaluated_weights == {"o": 0.0}
    with pytest.raises(ConfigError, match=message):
        parse_config(tree | sections)


def test_a_scorer_that_only_evaluates_needs_no_training_groups() -> None:
    """It compares held-out images, so shards, credit and granularities are free; and the guard does not watch it."""
    tree = {
        "iterations": 1,
        "model": {"path": "m"},
        "data": {"train": "a", "heldout": "b"},
        "group": {"size": 4, "shard": 2},
        "credit": {"rule": "gains"},
        "rewards": {"wins": WINS | {"use": "evaluate"}, "o": OTHER, "eyes": OTHER | {"use": "evaluate"}},
    }
    config = parse_config(tree)
    assert config.evaluation_rewards == ["wins", "o", "eyes"]
    assert (config.evaluated_weights, config.reward_weights) == ({"o": 1.0}, {"o": 1.0})
    assert config.watched_rewards == ["eyes"]


def test_a_vision_language_model_compares_two_images() -> None:
    """Over HTTP: it prefers the brighter one, and is silent about one pair."""

    def answer(asked: Asked) -> Answer:
        content = json.loads(asked.body)["messages"][0]["content"]
        urls = [part["image_url"]["url"].split(",")[1] for part in content[:2]]
        one, other = (int(decode_image(base64.b64decode(url))[0, 0, 0]) for url in urls)
        assert "a cat" in content[2]["text"]
        better = "tie" if one == other else "1" if one > other else "2"
        text = "I cannot say." if {one, other} == {10, 30} else f"Clear.\nBetter Image: {better}"
        return 200, "application/json", json.dumps({"choices": [{"message": {"content": text}}]}).encode()

    with http_server(answer) as (url, seen):
        settings = {"url": f"{url}/v1", "model": "judge", "tries": 1, "timeout_s": 5}
        scorer = build_scorer("win_rate", compare="rewards.http.vlm_pairs:VlmPairs", settings=settings)
        scores = scorer.score(GROUP, ["a cat"] * 4, [{}] * 4)
    assert len(seen) == 12
    assert scores.values.tolist() == [1.0, 0.0, 0.5, 0.5]
    assert scores.components["comparisons"].tolist() == [2.0, 2.0, 3.0, 3.0]
    for wrong in ({"pattern": "("}, {"pattern": "x"}, {"instruction": "which?"}):
        with pytest.raises(ScorerError):
            build_scorer("win_rate", compare="rewards.http.vlm_pairs:VlmPairs", settings=settings | wrong)
