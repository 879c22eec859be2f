"""The comparison with released code: parts of a script run alone, and both sides must do the same work."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.speed.peers.__main__ import proof
from benchmarks.speed.peers.ours import Update
from benchmarks.speed.peers.released import ast, loaded, part_of, run
from protocol.errors import ConfigError

SCRIPT = """
def main():
    for i in range(2):
        for j in steps:
            total.append(j * weight)
        for j in steps:
            pass
"""


def test_a_loop_inside_a_long_function_runs_with_given_variables(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    names: dict[str, Any] = {"steps": [1, 2], "weight": 10, "total": []}
    run(part_of(script, ast.For, "for j in ", "append("), names)
    assert names["total"] == [10, 20]
    with pytest.raises(LookupError, match="for k in"):
        part_of(script, ast.For, "for k in ")


def test_checkouts_with_one_package_name_are_apart_and_what_is_missing_is_a_mock(tmp_path: Path) -> None:
    for number in (1, 2):
        package = tmp_path / f"{number}" / "made_up_peer"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "kernel.py").write_text(f"import made_up_logger.handlers\nnumber = {number}\n")
    first, second = (loaded(tmp_path / f"{number}", "made_up_peer.kernel", f"url {number}") for number in (1, 2))
    assert (first.number, second.number) == (1, 2)
    assert "made_up_logger" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match=r"made_up_peer\.other"):
        loaded(tmp_path / "2", "made_up_peer.other", "url 2")


class Fake:
    """Takes the part of a peer whose gradient differs by a share of ours."""

    name, trains = "fake", True

    def __init__(self, apart: float) -> None:
        self.ours: Any = self
        self._gradients = [torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0 + 5 * apart])]

    def rewind(self) -> None: ...

    def rolled_out(self) -> dict[str, float]:
        return {"latents": 0.0}

    def update(self) -> Update:
        gradient = self._gradients.pop(0)
        return Update(gradient={"a": gradient}, change={"a": torch.ones(1)})


@pytest.mark.parametrize(("apart", "is_same"), [(1e-6, True), (1e-3, False)])
def test_sides_whose_gradients_differ_are_not_measured(apart: float, is_same: bool) -> None:
    fake: Any = Fake(apart)
    if is_same:
        assert proof(fake) == pytest.approx({"latents": 0.0, "gradient": apart, "change": 0.0}, rel=0.2)
    else:
        with pytest.raises(ConfigError, match="gradient that differ by 0.001"):
            proof(fake)
