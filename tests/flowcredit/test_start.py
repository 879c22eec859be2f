"""The user's own folders never take the place of ours."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flowcredit.packages import PACKAGES, hidden, shadows
from tests.support.paths import ROOT
from tests.support.scenes import long_scene

SCORER = """
import numpy as np
from beside import LEVEL
from rewards.scores import scored

class Level:
    name, low, high = "level", 0.0, 1.0
    @staticmethod
    def check(prompts): pass
    def score(self, images, prompts, metadata):
        return scored(np.clip(LEVEL * images.mean((1, 2, 3)) / 255, 0, 1))
"""


@pytest.fixture
def folder(tmp_path: Path, tiny_sd3: Path) -> Path:
    """A user's folder whose packages have our names, and a preset with a scorer in one of them."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong package')\n")
    (tmp_path / "beside.py").write_text("LEVEL = 1.0\n")
    (tmp_path / "rewards" / "mine.py").write_text(SCORER)
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "b.txt").write_text("b\n")
    preset = {
        "iterations": 1,
        "model": {"path": str(tiny_sd3), "max_sequence_length": 2},
        "data": {"train": "a.txt", "heldout": "b.txt"},
        "sampling": {"steps": 3},
        "group": {"size": 2, "per_iteration": 2},
        "rewards": {"mine": {"scorer": "./rewards/mine.py:Level"}},
        "evaluation": {"images_per_prompt": 1, "steps": 2},
        "cluster": {"rollout_actors": 1},
        "status": {"board": "off", "trajectories": 0},
    }
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(preset))
    return tmp_path


def flowcredit(folder: Path, *words: str, **variables: str) -> "subprocess.CompletedProcess":
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"} | variables
    command = [sys.executable, "-m", "flowcredit", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250, check=False
    )


@pytest.mark.whole
@pytest.mark.parametrize("where", ["--local", pytest.param("--no-page", marks=[pytest.mark.ray, long_scene])])
def test_a_run_uses_our_packages_and_the_user_s_scorer_beside_folders_of_the_same_names(
    folder: Path, where: str
) -> None:
    done = flowcredit(folder, "train", "own.yaml", where, "--run", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"note: {folder / 'rewards' / '__init__.py'} " in done.stderr
    inputs = json.loads((folder / "run" / "inputs.json").read_text())
    assert set(inputs) >= {"rewards.mine.scorer", "data.train", "data.heldout"}
    again = (folder / "rewards" / "mine.py").write_text(SCORER + "# another one\n")
    assert again
    done = flowcredit(folder, "train", "own.yaml", where, "--run", "run", "iterations=2")
    assert done.returncode == 2
    assert "was started with other contents: rewards.mine.scorer" in done.stderr


def test_modules_of_the_working_folder_are_found_last(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "yaml.py").write_text("raise RuntimeError('the wrong library')\n")
    done = flowcredit(tmp_path, "serve-rewards", "x=beside:Nothing", PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert "module 'beside' has no 'Nothing'" in done.stderr


def test_a_file_named_like_a_library_of_python_does_not_keep_the_program_from_starting(tmp_path: Path) -> None:
    for name in ("typing", "re"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong library')\n")
    done = flowcredit(tmp_path, "--version", PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("safe", [{}, {"PYTHONSAFEPATH": "1"}], ids=["with -m first", "with a safe path"])
def test_a_working_folder_on_the_python_path_stays_where_it_is(safe: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for folder, name in ((tmp_path, "Here"), (tmp_path / "elsewhere", "Elsewhere")):
        (folder / "beside.py").write_text(f"class {name}: pass\n")
    path = os.pathsep.join(map(str, (tmp_path, tmp_path / "elsewhere", ROOT)))
    done = flowcredit(tmp_path, "serve-rewards", "x=beside:Nothing", PYTHONPATH=path, **safe)
    assert "known: Here" in done.stderr


def test_a_module_of_ours_that_does_not_exist_is_named_by_its_file(tmp_path: Path) -> None:
    done = flowcredit(tmp_path, "serve-rewards", "x=rewards.mine:Level", PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert "./rewards/mine.py:Level" in done.stderr


def test_only_packages_and_modules_shadow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flow").mkdir()
    (tmp_path / "flow" / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    assert shadows() == []
    (tmp_path / "learner.py").write_text("")
    assert shadows() == [tmp_path / "learner.py"]


def test_only_what_is_found_elsewhere_too_is_hidden_by_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver finds the working folder last, and Ray's workers would find it first."""
    for name in ("torch.py", "sched/__init__.py", "numpy/notes.txt", "rewards/__init__.py", "mine.py", "sys.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    assert hidden() == ["sched", "torch"]
    monkeypatch.syspath_prepend(tmp_path)
    assert hidden() == [], "as a script of this folder, the driver takes its modules too"
    monkeypatch.chdir(ROOT)
    assert hidden() == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_a_working_folder_in_which_this_user_may_not_look_shadows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "learner.py").write_text("")
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0)
    try:
        assert shadows() == []
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_of_the_path_in_which_the_system_cannot_look_shadows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("/" + "x" * 256)
    assert not [path for path in shadows() if "xxx" in str(path)]


def test_a_working_folder_that_was_removed_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = [sys.executable, "-m", "flowcredit", "presets"]
    code = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); os.execv({words[0]!r}, {words!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No such file or directory" in line


def test_packages_that_ray_keeps_apart_are_all_ours(tmp_path: Path) -> None:
    """`flowcredit submit` sends each package by itself, and Ray keeps each in a folder of its own."""
    copies = tmp_path / "py_modules_files"
    for number, name in enumerate(("flowcredit", *PACKAGES)):
        shutil.copytree(ROOT / name, copies / f"_ray_pkg_{number}" / name, ignore=shutil.ignore_patterns("__pycache__"))
    path = [str(folder) for folder in copies.iterdir()]
    code = (
        f"import sys; sys.path[:0] = {path!r}; from flowcredit import packages; packages.ours_first(); import deploy;"
        f" print(deploy.__file__); print([str(each) for each in packages.shadows() if '_ray_pkg_' in str(each)])"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    where, shadows = said.splitlines()
    assert where.startswith(str(copies))
    assert shadows == "[]"


INTERRUPTED = """
import sys
from flowcredit import start

class Interrupt:
    @staticmethod
    def find_spec(name, *_):
        if name == "deploy.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt)
start.main()
"""


@pytest.mark.whole
def test_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    found = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (found.returncode, found.stderr) == (130, "flowcredit: stopped at once\n")


def test_a_python_without_the_dependencies_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", "flowcredit", "train", "toy_geneval"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"flowcredit: {sys.executable} (Python 3.") and "'typer'" in line
