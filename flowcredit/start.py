"""The roof: the entry of the program. `flowcredit` and `python -m flowcredit` see the same packages."""

import os
import sys
from importlib import import_module

from flowcredit.packages import ours_first, shadows


def main() -> None:
    """Run the command line."""
    try:
        here = os.getcwd()
    except OSError as error:
        sys.stderr.write(f"flowcredit: the working folder cannot be used: {error.strerror}; change to another one\n")
        sys.exit(2)
    if sys.path[0] in ("", here) and sys.path[-1] != here and not sys.flags.safe_path:
        del sys.path[0]  # `python -c` puts the working folder first; for `-m` our `__init__.py` has moved it to the end
    if here not in sys.path:
        sys.path.append(here)
    ours_first()
    for path in shadows():
        if (path.parents[1] / "flowcredit" / "start.py").is_file():
            continue  # another installation of ours, for instance on a node to which a job brings its own
        sys.stderr.write(
            f"flowcredit: note: {path} has the name of one of flowcredit's packages and is not used; name a scorer in"
            " it by its path, such as ./mine.py:Class\n"
        )
    try:
        import_module("deploy.cli.app").main()
    except KeyboardInterrupt:
        sys.stderr.write("flowcredit: stopped at once\n")
        sys.exit(130)
    except ImportError as error:
        sys.stderr.write(
            f"flowcredit: {sys.executable} (Python {sys.version.split()[0]}) must be 3.11 or newer and have the"
            f" dependencies of flowcredit: {error}; install them there (pip install), or start with another Python\n"
        )
        sys.exit(2)
