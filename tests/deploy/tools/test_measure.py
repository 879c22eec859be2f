"""`doctor --measure` and the rates of cards: what they say of a model, whole and cut."""

from collections.abc import Callable

import pytest

from deploy.tools import measure as measuring
from deploy.tools.estimate import estimate
from deploy.tools.measure import CARDS, assumed_tflops, find_card, measure
from protocol.config.run import RunConfig
from protocol.errors import ConfigError

Config = Callable[..., RunConfig]


class Clock:
    """A second for each reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass takes one second."""
    monkeypatch.setattr(measuring, "time", Clock())
    monkeypatch.setattr(measuring, "best_device", lambda: "cpu")


def test_a_whole_model_is_measured_in_its_own_shapes(tiny_config):
    config = tiny_config(group={"size": 4, "shard": 2}, model={"decode_batch": 1})
    counts = estimate(config).evaluations
    speed = measure(config, counts)
    assert (speed.forwards, speed.gradients, speed.images, speed.cut) == (2.0, 2.0, 1.0, "")
    assert speed.tflops == pytest.approx(2 * counts.forward_flops / 1e12)
    assert f"use --tflops {speed.tflops:.3g}" in list(speed.lines())[-1]


def test_a_cut_model_counts_by_its_operations(tiny_config, monkeypatch):
    monkeypatch.setattr(measuring, "LARGE", 0.0)
    monkeypatch.setattr(measuring, "CUT", {"height": 8, "width": 8})
    config = tiny_config()
    counts = estimate(config).evaluations
    speed = measure(config, counts)
    assert "measured with one layer" in speed.cut
    assert 0.05 < speed.forwards < 0.7, "one of two layers, a quarter of the latents"
    assert speed.images == pytest.approx(0.25, rel=0.2), "a quarter of an image in a second"


def test_decoding_is_counted_by_image(tiny_config):
    counts = estimate(tiny_config()).evaluations
    assert counts.decoding_flops == pytest.approx(counts.images * counts.image_flops)
    assert counts.image_flops > 0


def test_a_card_reaches_a_share_of_its_peak_and_an_unknown_one_is_refused():
    assert find_card("NVIDIA H200") == CARDS["H200"]
    assert find_card("NVIDIA A100-SXM4-80GB") == CARDS["A100"]
    assert find_card("CPU") is None
    assert assumed_tflops("h100") == pytest.approx(0.2 * 989)
    with pytest.raises(ConfigError, match="^--card must be one of .*'H100'.*, got 'V100'"):
        assumed_tflops("V100")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["doctor", "--measure"], "--measure needs a preset whose model is measured, got none"),
        (
            ["train", "toy_geneval", "--dry-run", "--tflops", "3", "--card", "H100"],
            "--tflops and --card exclude each other, got 3 and 'H100': leave one out",
        ),
    ],
)
def test_words_that_do_not_fit_are_one_line(words, line, cli):
    said = cli.refused(*words)
    assert line in said
