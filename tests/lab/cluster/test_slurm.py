"""The Slurm script on two machines that share a disk, with stand-ins for `srun` and `scontrol`."""

import signal
from pathlib import Path

import pytest

from deploy.folder.metric_file import last_line
from deploy.folder.names import METRICS
from tests.lab.faults.cluster import RUN, furnish_project, require_same
from tests.lab.faults.lab import STORE, laboratory, until
from tests.lab.faults.slurm import Allocation
from tests.support.runs.scene import Story
from tests.support.scenes import long_scene

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


@long_scene
def test_an_allocation_that_ends_is_queued_again_and_resumes_its_run(tmp_path: Path, undisturbed: Story):
    with laboratory(tmp_path / "lab", machines=2) as lab, Allocation(lab.machines) as allocation:
        furnish_project(lab.store)
        words = ("mine.yaml", "--run", f"{STORE}/run")
        run = lab.store / "run"
        first = allocation.start(f"{STORE}/flowcredit/deploy/slurm/flowcredit.sbatch", *words)
        until(lambda: iteration(run) >= 2 or first.poll() is not None, "iteration 2", seconds=600)
        assert first.poll() is None, (lab.store / "batch.log").read_text()
        (script,) = lab.machines[0].processes(r"^bash .*flowcredit\.sbatch")
        script.send_signal(signal.SIGUSR1)
        assert first.wait(300) == 0, (lab.store / "batch.log").read_text()
        assert (lab.store / "requeued").read_text() == "7\n"
        assert "stopping with a checkpoint" in (lab.store / "batch.log").read_text()
        until(lambda: not lab.machines[1].processes("raylet"), "the cluster has ended")
        assert iteration(run) < RUN["iterations"]
        second = allocation.start(f"{STORE}/flowcredit/deploy/slurm/flowcredit.sbatch", *words, restarts=1)
        assert second.wait(900) == 0, (lab.store / "batch.log").read_text()
        assert (lab.store / "requeued").read_text() == "7\n"
        require_same(run, undisturbed)


def iteration(run: Path) -> int:
    newest = last_line(run / METRICS)
    return newest["iteration"] if newest else 0
