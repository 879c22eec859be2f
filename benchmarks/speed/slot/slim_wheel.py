"""Makes Ray's wheel small enough to travel: without what no run imports, and packed by LZMA.

    python -m benchmarks.speed.slot.slim_wheel wheels/ray-*.whl    # 76 MiB become 27

pip installs it like the whole one.
"""

import sys
from pathlib import Path
from zipfile import ZIP_LZMA, ZipFile

NEEDLESS = ("jars", "rllib", "llm", "serve", "tune", "data", "train", "dashboard/client")
"""Folders of `ray`: for Java, for other libraries on Ray, and the dashboard's pages."""


def slim(wheel: Path) -> None:
    """Replace a wheel of Ray by a small one."""
    small = wheel.with_suffix(".small")
    with ZipFile(wheel) as whole, ZipFile(small, "w", ZIP_LZMA) as kept:
        for entry in whole.infolist():
            if not entry.filename.startswith(tuple(f"ray/{folder}/" for folder in NEEDLESS)):
                content = whole.read(entry)
                entry.compress_type = ZIP_LZMA
                kept.writestr(entry, content)
    small.replace(wheel)


if __name__ == "__main__":
    slim(Path(sys.argv[1]))
