"""Fine-tunes text-to-image models with credit for every denoising step: the program's entry, and its library.

`flowcredit.train`, `flowcredit.read_run` and the other names of `deploy.library` are imported at their first use, so
`import flowcredit` is cheap.
"""

import sys

if sys.argv[:1] == ["-m"] and {"flowcredit", "-mflowcredit"} & {*sys.orig_argv} and not sys.flags.safe_path:
    # `python -m flowcredit` puts the working folder first: a file such as `typing.py` there would hide a library.
    sys.path.append(sys.path.pop(0))

from importlib import import_module
from typing import Any

from flowcredit.packages import ours_first


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    ours_first()
    library = import_module("deploy.library")
    if name not in library.__all__:
        raise AttributeError(f"flowcredit has no {name!r}, it has {', '.join(library.__all__)}")
    return getattr(library, name)


def __dir__() -> list[str]:
    ours_first()
    return list(import_module("deploy.library").__all__)
