"""The account of an iteration: its parts leave little over, none counts twice, and its counts are the estimate's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident

import pytest

from benchmarks.clock import cpu_clock
from benchmarks.speed import iteration
from deploy.presets import load_config
from deploy.tools.estimate import estimate
from flow.meter import Meter
from tests.support.runs.scene import preset


@pytest.fixture
def nested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a thread began to time inside another timed part: its seconds would count twice."""
    inside: dict[int, str] = {}
    found: list[str] = []
    timed = Meter.timed

    @contextmanager
    def watched(meter: Meter, part: str) -> Iterator[None]:
        thread = get_ident()
        if thread in inside:
            found.append(f"{part} in {inside[thread]}")
        inside[thread] = part
        try:
            with timed(meter, part):
                yield
        finally:
            inside.pop(thread, None)

    monkeypatch.setattr(Meter, "timed", watched)
    return found


@pytest.mark.whole
def test_the_parts_of_an_iteration_are_most_of_it_and_none_counts_twice(
    tmp_path: Path, tiny_sd3: Path, nested: list[str]
) -> None:
    in_turn = {"max_lag": 0}  # with a lag, rollouts and updates share their seconds
    config = load_config(str(preset(tmp_path, tiny_sd3, iterations=2, group=in_turn)), overrides=[])
    with cpu_clock(iteration):  # a stall takes no CPU seconds
        parts, held, cost = iteration.account(config, is_local=True)
    by_name = {part.name: part for part in parts}
    assert cost.forward == min(cost.forwards.values()) and set(cost.forwards) >= {1, config.group.shard}
    counts = estimate(config).evaluations
    left = by_name["everything else"].seconds / held["seconds/iteration"]
    assert not nested
    assert left < 0.5
    assert (by_name["sampling"].count or 0) + (by_name["completing"].count or 0) == counts.rollout
    assert by_name["scoring"].count == by_name["decoding"].count == counts.images
    assert 0 < (by_name["training"].count or 0) <= counts.pairs
    for name in ("sampling", "completing", "decoding", "scoring", "training"):
        assert (by_name[name].bound_s or 0) > 0 and by_name[name].seconds > 0
    assert by_name["sampling"].tflop == pytest.approx((by_name["sampling"].count or 0) * counts.forward_flops / 1e12)
