"""What a process holds in memory: blocks in use of the C library (of this process only), and anonymous pages."""

import ctypes
import math
import re
from pathlib import Path

MIB = 2**20


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def in_use_mib() -> float:
    """Return MiB in blocks of glibc's malloc that are not free, in all its heaps; NaN with another C library."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return math.nan
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return (found.uordblks + found.hblkhd) / MIB


def anonymous_mib(process: int | str = "self") -> float:
    """Return MiB of a process's anonymous memory, where a page that n processes share counts as 1/n of it.

    Args:
        process: its pid.

    Raises:
        FileNotFoundError: it has ended.
        ProcessLookupError: the same, while its memory was read.
    """
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii")
    (kib,) = re.findall(r"^Pss_Anon:\s+(\d+) kB$", rollup, re.MULTILINE)
    return int(kib) / 1024
