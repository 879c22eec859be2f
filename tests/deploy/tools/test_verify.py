"""What `flowcredit verify` says of the learner group, and of the link to the newest checkpoint while a run goes on."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.folder.names import METRICS
from deploy.folder.run_folder import open_run_folder
from deploy.tools.verify import Verified, verify
from protocol.config.run import RunConfig


@pytest.fixture
def said(tmp_path: Path, tiny_config: Callable[..., RunConfig]) -> Callable[..., list[Verified]]:
    """What is said of a run whose iterations had groups of these sizes; 0: one process."""

    def said(*sizes: int) -> list[Verified]:
        config = tiny_config(learner={"lanes": 4})
        open_run_folder(tmp_path / "run", config).close()
        each = config.group.per_iteration
        lines = [
            {"iteration": n + 1, "ledger/first": n * each, "ledger/last": (n + 1) * each - 1, "seconds/update": 4.0}
            | ({"update/workers": float(size), "update/reduction_seconds": 0.5} if size else {})
            for n, size in enumerate(sizes)
        ]
        (tmp_path / "run" / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return [finding for finding in verify(tmp_path / "run") if finding.subject == "learner"]

    return said


def test_verify_tells_the_size_of_the_group_over_time_and_how_often_its_digests_were_equal(said):
    (finding,) = said(1, 4, 4, 2, 0)
    assert finding.is_whole
    for words in ("4 workers in iterations 2 to 3", "one process in iterations 5 to 5", "after 3 updates", "12%"):
        assert words in finding.found


def test_a_size_that_no_group_can_have_is_damage(said):
    (finding,) = said(2, 3)
    assert not finding.is_whole
    assert finding.found == "3 workers cannot have shared 4 lanes"


def test_a_run_without_an_update_has_no_group(said):
    assert said() == []


@pytest.mark.parametrize("is_running", [True, False])
def test_a_link_that_the_run_is_about_to_move_is_no_damage(
    tmp_path: Path, tiny_config: Callable[..., RunConfig], *, is_running: bool
) -> None:
    open_run_folder(tmp_path / "run", tiny_config()).close()
    checkpoints = tmp_path / "run/checkpoints"
    for name in ("iteration_000001", "iteration_000002"):
        (checkpoints / name).mkdir()
    (checkpoints / "latest").symlink_to("iteration_000001")
    (checkpoints / "next").symlink_to("iteration_000002")
    mover = threading.Timer(0.3, (checkpoints / "next").rename, [checkpoints / "latest"])
    if is_running:
        mover.start()
    (link,) = [finding for finding in verify(tmp_path / "run") if finding.subject == "latest"]
    mover.cancel()
    assert link.is_whole == is_running
    behind = "points to iteration_000001, but the newest is iteration_000002"
    assert link.found == ("points to iteration_000002" if is_running else behind)
