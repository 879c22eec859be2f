"""Prints the results of a run folder as text, in a job on the cluster, so that the job's log carries them.

`deploy.jobs.fetch` sends only this file, so it needs nothing but Python:

    python pack.py RUN      # an absolute path, or a name in the folder of runs of `deploy.folder.location`

Each line of the archive begins with `DATA `; the last line is `WHOLE ` and the archive's sha256. If there is no
archive, a line that begins with `REFUSED ` gives the reason.
"""

import base64
import hashlib
import os
import sys
import tarfile
import tempfile
from pathlib import Path

DATA, WHOLE, REFUSED = "DATA ", "WHOLE ", "REFUSED "
PIECE = 48 * 1024
"""Bytes of the archive in one line."""
FILES = (
    "config.yaml",
    "inputs.json",
    "origin.json",
    "metrics.jsonl",
    "events.jsonl",
    "status.json",
    "run.log",
    "wandb.id",
    "mlflow.id",
)
FOLDERS = ("gallery", "suites", "trajectories", "tensorboard", "wandb")


def main() -> None:
    """Print the archive of the run that the command line names."""
    runs = os.environ.get("FLOWCREDIT_RUNS") or "~/flowcredit/runs"
    name = Path(sys.argv[1].removeprefix("runs/"))  # as `train --run` in a job
    run = Path(runs).expanduser() / name.expanduser()
    if not (run / FILES[0]).is_file():
        parent = run.parent
        held = sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
        print(f"{REFUSED}there is no run {run}; {parent} holds {', '.join(held) or 'nothing'}")  # noqa: T201
        return
    sha = hashlib.sha256()
    with tempfile.TemporaryFile() as archive:
        with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
            for path in members(run):
                tar.add(path, arcname=str(path.relative_to(run)))
        archive.seek(0)
        while piece := archive.read(PIECE):
            sha.update(piece)
            print(DATA + base64.b64encode(piece).decode())  # noqa: T201
    print(WHOLE + sha.hexdigest())  # noqa: T201


def members(run: Path) -> list[Path]:
    """List the files to send: `FILES`, the files in `FOLDERS`, and the newest whole checkpoint."""
    whole = [path.parent for path in (run / "checkpoints").glob("iteration_*/manifest.json")]
    folders = [run / name for name in FOLDERS]
    folders += sorted(whole, key=lambda path: (len(path.name), path.name))[-1:]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return [*(run / name for name in FILES if (run / name).is_file()), *files]


if __name__ == "__main__":
    main()
