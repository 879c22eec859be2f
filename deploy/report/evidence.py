"""Packs what others need to judge a run into a folder to publish: config, versions, device, curves, images, scores."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

from deploy.folder.names import CONFIG, GALLERY, INPUTS, METRICS, ORIGIN
from deploy.folder.read import origin_of, require_run
from deploy.report.account import rates_of
from deploy.report.page import write_report
from deploy.report.runs import HELDOUT, Run, groups_of, read_runs
from flowcredit.packages import VERSION
from protocol.errors import RunFolderError
from protocol.ground.files import sha256_of, whole, writing

COPIED = (CONFIG, INPUTS, ORIGIN, METRICS)
EVIDENCE, REPORT, CHARTS = "evidence.json", "report.html", "charts"
STAGE = "seconds/"


def pack_evidence(path: Path, out: Path, *, device: str | None = None) -> Path:
    """Write the evidence of a run to a new folder: its files, gallery and report, and `evidence.json`.

    `evidence.json` has the versions, our commit, the device, seconds by part, GPU-hours, held-out scores, and the
    sha256 of every other file.

    Args:
        path: the run folder; of a run in progress, the finished iterations count.
        out: the folder to write; it must not exist, or be empty.
        device: what the run computed on; None takes the name of this machine's GPU.

    Returns:
        `out`.

    Raises:
        RunFolderError: there is no run or no iteration of it, or the folder cannot be written.
    """
    require_run(path)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"--out must be a new or empty folder, got {out}: name another one")
    (run,) = read_runs([path])
    with writing(out, "--out"):
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with whole(out) as partial:
            partial.mkdir()
            for name in COPIED:
                if (path / name).exists():
                    shutil.copyfile(path / name, partial / name)
            if (path / GALLERY).is_dir():
                shutil.copytree(path / GALLERY, partial / GALLERY)
            write_report([path], partial / REPORT, partial / CHARTS)
            held = sorted(file for file in partial.rglob("*") if file.is_file())
            facts = facts_of(run, device or _gpu()) | {
                "sha256": {str(file.relative_to(partial)): sha256_of(file) for file in held}
            }
            (partial / EVIDENCE).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return out


def facts_of(run: Run, device: str | None) -> dict[str, Any]:
    """Summarise a run in numbers."""
    (group,) = groups_of([run])
    rates, origin = rates_of(group), origin_of(run.path)
    iterations, _, scores = run.values(HELDOUT, of="evaluations")
    stages = sorted({name for line in run.iterations for name in line if name.startswith(STAGE)})
    gpus = rates.gpus if rates else 0.0
    return {
        "run": run.name,
        "flowcredit": VERSION,
        "commit": commit(),
        "versions": origin.versions if origin else {},
        "device": device,
        "gpus": gpus,
        "iterations": len(run.iterations),
        "images": len(run.iterations) * run.config.group.per_iteration * run.config.group.size,
        "hours": round(run.seconds / 3600, 3),
        "gpu_hours": round(gpus * run.seconds / 3600, 3),
        "seconds": {name.removeprefix(STAGE): group.mean(name) for name in stages},
        "heldout": [
            {"iteration": int(iteration), "score": float(score)}
            for iteration, score in zip(iterations, scores, strict=True)
        ],
    }


def commit() -> str | None:
    """Return the git commit of this code, with `+` if files are changed; None if it is no git checkout."""
    here = Path(__file__).parent

    def said(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=30
        ).stdout.strip()

    try:
        if here != Path(said("rev-parse", "--show-toplevel")) / "deploy" / "report":
            return None  # installed into some other project's checkout
        return said("rev-parse", "HEAD") + ("+" if said("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
