"""The work that the memory benchmark measures is that of the roles, on files."""

from pathlib import Path

import pytest

from benchmarks.speed.memory import Cell, learn, roll_out, score
from deploy.presets import load_config
from tests.support.runs.scene import preset


@pytest.mark.whole
def test_each_role_does_its_work_with_what_the_one_before_left(tmp_path: Path, tiny_sd3: Path) -> None:
    config = load_config(str(preset(tmp_path, tiny_sd3)), overrides=[])
    work = tmp_path / "work"
    work.mkdir()
    roll_out(config, work)
    shards = config.group.per_iteration * config.group.size // config.group.shard
    assert len(list(work.glob("*.rollout"))) == len(list(work.glob("*.images"))) == shards
    learn(config, work)
    score(config, work, "redness")


def test_the_ratio_is_of_what_is_above_the_process() -> None:
    cell = Cell(variant="", role="learner worker", predicted=90, in_use=100, resident=130, base=500)
    assert cell.ratio == 0.9
