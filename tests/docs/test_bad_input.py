"""The messages that docs/method/README.md shows for bad input are those that a user sees."""

import re

import pytest

from deploy.presets import load_config
from protocol.errors import ConfigError
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "method" / "README.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"^    (.+: .+)$", PAGE.split("## Bad input")[1], re.MULTILINE)
MADE_BY = (
    ["method=flow_gpro"],
    ["group.size=1"],
    ["sampling.window.rule=branch", "group.shard=1"],
    ["sampling.window={rule: fixed, first: 9, size: 2}", "sampling.steps=10"],
    ["sampling.kernel=ddim_sde", "sampling.noise_level=1.5"],
    ["completion.substeps=0"],
    ["credit.rule=gain"],
)
"""Overrides of `toy_geneval`; the window without a stochastic step is found where the schedule is known, not here."""


@pytest.mark.parametrize("overrides", MADE_BY, ids=lambda overrides: overrides[0])
def test_the_page_shows_the_message(overrides: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("toy_geneval", overrides=overrides)
    assert any(str(caught.value).startswith(shown.removesuffix(" …")) for shown in SHOWN), caught.value
