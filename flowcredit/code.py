"""A digest of our own code, so that processes that must compute alike can tell whether they have the same."""

import hashlib
import subprocess
from functools import cache
from itertools import product
from pathlib import Path

from flowcredit.packages import ROOT, package_folders

CODE = "flowcredit's code"
"""Name of `code_digest` among the facts that the processes of a role must share."""
COMPUTING = ("protocol", "flow", "learner", "rewards", "toyworld")
"""The packages that decide what is generated, scored and learnt."""


@cache
def code_digest() -> str:
    """Compute the first 12 digits of the sha256 of all files of the packages `COMPUTING`, once for each process."""
    sha = hashlib.sha256()
    for name, folder in product(COMPUTING, package_folders()):
        for path in sorted(Path(folder, name).rglob("*.py")):
            sha.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return sha.hexdigest()[:12]


@cache
def git_commit() -> str | None:
    """Return the first 12 digits of the commit that our code is checked out from, with `, changed` if tracked files
    differ from it; None if it does not lie in a repository of its own."""
    if not (ROOT / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=10, check=True)
            for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip() + (", changed" if changes.stdout.strip() else "")
