"""A wrong wall clock: a library in C that a process preloads, in every language and at every depth.

libfaketime is not used: under it Ray's processes abort, and without its monotonic clock `time.sleep` fails.
"""

import subprocess
from pathlib import Path

from tests.support.programs import need

SOURCE = Path(__file__).with_suffix(".c")


def wrong_clock(folder: Path, offset_s: int) -> Path:
    """Compile the library.

    Args:
        folder: for the library.
        offset_s: seconds that the wall clock is ahead.

    Returns:
        The library, for LD_PRELOAD.
    """
    library = folder / f"clock{offset_s:+d}.so"
    words = ["-shared", "-fPIC", "-O2", "-Wall", f"-DOFF_S=({offset_s})", "-o", library, SOURCE]
    subprocess.run([need("gcc"), *words], check=True)
    return library
