"""`flowcredit doctor` and `flowcredit verify`: every line says what is, and what to do."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deploy.folder.names import METRICS
from deploy.folder.read import config_of
from deploy.folder.run_folder import open_run_folder
from deploy.presets import load_config
from deploy.tools import doctor
from deploy.tools.doctor import Finding, Question, examine
from deploy.tools.verify import ledger_faults, verify
from learner.checkpoint import read_checkpoint, write_checkpoint
from protocol.errors import RunFolderError
from protocol.messages import Adapter, LearnerState, digest_of


def found(question: Question) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(question)}


def test_the_shipped_preset_is_ready_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("FLOWCREDIT_BOARD", raising=False)
    config = load_config("toy_geneval")
    findings = found(Question(config=config, run=tmp_path / "runs"))
    assert [f for f in findings.values() if f.verdict == "bad"] == []
    assert "torch" in findings["libraries"].found
    assert "held out" in findings["prompts"].found
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "subject", "remedy"),
    [
        ({"model": {"path": "/nowhere"}}, "preset", "see this line"),
        (
            {
                "rewards": {"clip": {"scorer": "clipscore", "args": {"model": "/nowhere"}}},
                "data": dict.fromkeys(("train", "heldout"), "pkg://deploy/prompts/ocr_train.txt"),
                "evaluation": {"component": "reward"},
            },
            "rewards",
            "see this line",
        ),
        ({"cluster": {"address": "127.0.0.1:1"}}, "ray", "check cluster.address"),
        ({"cluster": {"address": "127.0.0.1:x"}}, "ray", "check cluster.address"),
    ],
)
def test_what_stops_a_run_is_bad_and_has_a_remedy(change, subject, remedy, tiny_config, tmp_path):
    config = tiny_config(**change)
    finding = found(Question(config=config, run=tmp_path))[subject]
    assert finding.verdict == "bad"
    assert remedy in finding.remedy


def test_a_board_that_does_not_answer_is_a_note(monkeypatch, tmp_path):
    monkeypatch.setenv("FLOWCREDIT_BOARD", "redis://127.0.0.1:1/0")
    finding = found(Question(config=None, run=tmp_path))["board"]
    assert finding.verdict == "note"
    assert "training works without it" in finding.remedy


def test_prompts_that_are_in_both_files_are_noted(tiny_config, tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("two\nthree\n")
    config = tiny_config(data={"train": str(tmp_path / "a.txt"), "heldout": str(tmp_path / "b.txt")})
    (finding,) = doctor.inputs_may_mislead(Question(config=config, run=tmp_path))
    assert finding.found == "1 of 2 held-out prompts are trained on too, such as 'two'"
    assert "without common prompts" in finding.remedy


def test_a_machine_without_linux_calls_is_checked(monkeypatch, tmp_path):
    monkeypatch.delattr(doctor.os, "sched_getaffinity")
    (finding,) = doctor.cores(Question(config=None, run=tmp_path))
    assert finding.found == f"{doctor.os.cpu_count()} cores"


def test_gpus_that_are_not_there_are_counted(tiny_config, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    rewards = {"dark": {"scorer": "tests.support.rewards.dark:Dark", "gpus": 0.5, "actors": 2}}
    learner = {"gpus": 1, "workers": 4}
    config = tiny_config(cluster={"rollout_actors": 3, "rollout": {"gpus": 1}, "learner": learner}, rewards=rewards)
    (finding,) = doctor.gpus(Question(config=config, run=tmp_path))
    assert (finding.verdict, finding.found) == ("bad", "none; the actors reserve 8 GPUs, this machine has 0")


def test_libraries_of_other_versions_are_one_line(monkeypatch, tmp_path):
    versions = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name in ("torch", "peft") else versions(name))
    (finding,) = doctor.libraries(Question(config=None, run=tmp_path))
    assert finding.verdict == "bad"
    assert "'torch>=2.10'" in finding.remedy and "'peft>=0.18'" in finding.remedy and "numpy" not in finding.remedy


def test_a_check_that_fails_itself_is_a_line(monkeypatch, tmp_path):
    def broken(_: Question):
        raise OSError("a disk on fire")

    monkeypatch.setattr(doctor, "CHECKS", [broken])
    (finding,) = examine(Question(config=None, run=tmp_path))
    assert finding.verdict == "bad"
    assert "a disk on fire" in finding.found


def test_the_command_s_exit_code_tells_whether_a_run_can_start(monkeypatch, cli):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "ok    model" in cli.done("doctor", "toy_geneval")
    assert "BAD   preset" in cli.ended("doctor", "toy_geneval", "model.path=/nowhere", code=1)[0]


def state(iteration: int) -> LearnerState:
    arrays = {"transformer.q.lora_A.weight": np.full((2, 4), iteration, np.float32)}
    adapter = Adapter(version=iteration, arrays=arrays, digest=digest_of(arrays))
    return LearnerState(iteration=iteration, adapter=adapter, optimizer={})


@pytest.fixture
def folder(tiny_config, tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("a\n")
    prompts = str(tmp_path / "prompts.txt")
    run = open_run_folder(tmp_path / "run", tiny_config(data={"train": prompts, "heldout": prompts}))
    for iteration in (1, 2):
        run.append({"iteration": iteration, "ledger/first": 2.0 * iteration - 2, "ledger/last": 2.0 * iteration - 1})
        run.save(state(iteration))
    run.close()
    return tmp_path / "run"


def test_a_whole_run_is_verified(folder, cli):
    assert all(each.is_whole for each in verify(folder))
    assert "every group exactly once" in cli.done("verify", str(folder))


def harm_checkpoint(run: Path) -> None:
    path = next((run / "checkpoints/iteration_000001").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def harm_ledger(run: Path) -> None:
    lines = (run / METRICS).read_text().splitlines()
    (run / METRICS).write_text(lines[1] + "\n")


def cut_ledger(run: Path) -> None:
    lines = (run / METRICS).read_text().splitlines()
    (run / METRICS).write_text(lines[0] + "\n" + lines[1][:20])


def harm_prompts(run: Path) -> None:
    (run.parent / "prompts.txt").write_text("b\n")


@pytest.mark.parametrize(
    ("harm", "subject"),
    [
        (harm_checkpoint, "iteration_000001"),
        (harm_ledger, "ledger"),
        (cut_ledger, "ledger"),
        (lambda run: (run / METRICS).unlink(), "ledger"),
        (harm_prompts, "inputs.json"),
        (lambda run: (run / METRICS).write_text("{\n"), METRICS),
        (lambda run: (run / "config.yaml").write_text("a: ["), "config.yaml"),
        (lambda run: (run / "inputs.json").unlink(), "inputs.json"),
        (lambda run: shutil.rmtree(run / "checkpoints/iteration_000002"), "latest"),
    ],
    ids=["checkpoint", "ledger", "end of the ledger", "no metrics", "prompts", "metrics", "config", "inputs", "latest"],
)
def test_what_is_not_whole_is_named(folder, harm, subject, cli):
    harm(folder)
    assert [each.subject for each in verify(folder) if not each.is_whole] == [subject]
    cli.ended("verify", str(folder), code=1)


def test_a_run_that_goes_on_meanwhile_is_whole(folder, monkeypatch):
    """While the newest checkpoint is read, the run writes another one and removes the oldest."""
    root, read = folder / "checkpoints", read_checkpoint

    def slowly(path: Path) -> LearnerState:
        if path.name == "iteration_000002":
            with (folder / METRICS).open("a") as file:
                file.write('{"iteration": 3, "ledger/first": 4.0, "ledger/last": 5.0}\n')
            write_checkpoint(root, state(3), config_of(folder).model.lora, keep=2)
        return read(path)

    monkeypatch.setattr("deploy.tools.verify.read_checkpoint", slowly)
    found = list(verify(folder))
    assert [each for each in found if not each.is_whole] == []
    assert not (root / "iteration_000001").exists()
    assert [each.found for each in found if each.subject == "latest"] == ["points to iteration_000003"]


def test_something_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="must hold config.yaml, got none"):
        list(verify(tmp_path))


def test_the_ledger_shows_gaps_repetitions_and_strangers():
    def line(iteration: int, first: int) -> dict:
        return {"iteration": iteration, "ledger/first": float(first), "ledger/last": float(first + 1)}

    good = [line(1, 0), {"iteration": 1, "evaluation/score": 1.0}, line(2, 2), line(3, 4)]
    assert ledger_faults(good, 2) == []
    assert ledger_faults([line(1, 0), line(3, 4)], 2) == ["iteration 3 found, 2 expected"]
    assert ledger_faults([line(1, 0), line(1, 0)], 2) == ["iteration 1 found, 2 expected"]
    assert ledger_faults([line(1, 0), line(2, 0)], 2) == ["iteration 2 learned from other groups than 2 to 3"]
    assert json.dumps(ledger_faults([], 2)) == "[]"
    assert ledger_faults(good, 2, newest=3) == []
    assert ledger_faults(good, 2, newest=5) == ["it ends before iteration 4, but there is a checkpoint of iteration 5"]


@pytest.mark.parametrize("offload", [False, True])
def test_a_bundle_that_needs_more_memory_than_a_gpu_has_is_bad_and_has_a_remedy(
    tiny_config, tmp_path, monkeypatch, offload
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(total_memory=2**30))
    role = {"gpus": 0.5}
    cluster = {"layout": "colocated", "rollout_actors": 1, "rollout": role, "learner": role, "offload": offload}
    (finding,) = doctor.gpu_memory(Question(config=tiny_config(cluster=cluster), run=tmp_path))
    assert finding.verdict == "bad"
    assert "a GPU of this machine has 1.0" in finding.found
    first, *others = finding.remedy.split(", or ")
    assert first == (
        "set cluster.layout=separate" if offload else "set cluster.offload=true or cluster.layout=separate"
    )
    assert others[0].startswith("set model.gradient_checkpointing=true, ")
    assert others[1] == "use a larger card"


def test_a_run_folder_below_a_file_and_labels_without_a_cluster_are_bad(tiny_config, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (file := tmp_path / "file").write_text("")
    config = tiny_config(cluster={"learner": {"labels": {"pool": "a"}}})
    findings = found(Question(config=config, run=file / "runs"))
    assert (findings["run folder"].verdict, findings["run folder"].found) == ("bad", f"{file} is no folder")
    assert (findings["ray"].verdict, findings["ray"].remedy) == ("bad", "set cluster.address, or remove them")
