"""A digest of our own code, so that processes that must compute alike can tell whether they have the same."""

import hashlib
from functools import cache
from itertools import product
from pathlib import Path

from flowcredit.packages import homes

CODE = "flowcredit's code"
"""Name of `code_digest` among the facts that the processes of a role must share."""
COMPUTING = ("protocol", "flow", "learner", "rewards", "toyworld")
"""Those of `flowcredit.packages.PACKAGES` that decide what is generated, scored and learnt."""


@cache
def code_digest() -> str:
    """Compute the first 12 digits of the sha256 of all files of the packages `COMPUTING`, once for each process."""
    sha = hashlib.sha256()
    for name, home in product(COMPUTING, homes()):
        for path in sorted(Path(home, name).rglob("*.py")):
            sha.update(path.relative_to(home).as_posix().encode() + path.read_bytes())
    return sha.hexdigest()[:12]
