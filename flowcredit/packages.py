"""The ground floor: the version, the names of our packages, and where they are found. It imports nothing of ours.

Our packages are found beside this one, before all of `sys.path`; a user's folder `rewards/` never shadows ours. The
working folder is the last entry of `sys.path`, so modules there can be named in a config.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

VERSION = "0.1.0"
PACKAGES = ("protocol", "flow", "toyworld", "rewards", "learner", "actors", "deploy")
ROOT = Path(__file__).resolve().parents[1]
RAY_COPY = "_ray_pkg_"
"""Prefix of the folders in which Ray keeps the files of a job."""
HOOK = f"{__name__}.begin_worker"
"""Import path of the function that Ray calls in every worker process."""
FOLDER_VARIABLE = "FLOWCREDIT_WORKING_FOLDER"
"""Names the driver's working folder to the worker processes whose hook is `begin_worker`."""


class Ours:
    """A finder of `sys.meta_path` that knows `PACKAGES` only."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, _: ModuleType | None = None) -> ModuleSpec | None:
        """Find one of our packages beside this one.

        Args:
            path: None for a top-level package.

        Returns:
            Where it is; None if it is not of `PACKAGES`.
        """
        return PathFinder.find_spec(name, package_folders()) if path is None and name in PACKAGES else None


class FolderLast:
    """A finder of `sys.meta_path` that finds nothing, but keeps a folder from being the first of `sys.path`."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, *_: object) -> None:
        """Move the folder to the end of the path, before the finders after this one search there."""
        while sys.path[:1] == [self._folder] and set(sys.path) != {self._folder}:
            sys.path.append(sys.path.pop(0))


def package_folders() -> list[str]:
    """List the folders of our packages: one, or several in a Ray job, since `flowcredit submit` uploads each alone."""
    beside = (Path(entry) for entry in sys.path if ROOT.name.startswith(RAY_COPY))
    copies = (path for path in beside if path.name.startswith(RAY_COPY) and path.resolve().parent == ROOT.parent)
    return list(dict.fromkeys([str(ROOT), *map(str, copies)]))


def ours_first() -> None:
    """Make this process find our packages before others of the same name."""
    if Ours not in sys.meta_path:
        sys.meta_path.insert(0, Ours)


def begin_worker() -> None:
    """Make a worker process of Ray find modules where its driver does: our packages first, and the working folder last
    if its driver says so.

    Ray calls this in every worker process, and afterwards puts the driver's working folder first.
    """
    if folder := os.environ.get(FOLDER_VARIABLE):
        sys.meta_path.insert(0, FolderLast(folder))
    ours_first()


def hidden() -> list[str]:
    """List the modules that Ray's workers would take from the working folder, but this process takes from elsewhere."""
    here = os.getcwd()
    names = [each.name for each in iter_modules([here]) if each.name not in ("flowcredit", *PACKAGES)]
    return [name for name in names if (file := _file_of(name, sys.path)) and file != _file_of(name, [here])]


def _file_of(name: str, path: Sequence[str]) -> str:
    """Return the file of a top-level module or package on this path; an empty text if there is none."""
    spec = PathFinder.find_spec(name, path)
    return os.path.realpath(spec.origin) if spec and spec.origin else ""


def shadows() -> list[Path]:
    """List foreign packages and modules on `sys.path` that have the name of one of ours."""
    known = {str(Path(folder).resolve()) for folder in package_folders()}
    folders = dict.fromkeys(Path(entry).resolve() for entry in (*sys.path, os.getcwd()))
    found = (
        folder / ending
        for folder in folders
        if str(folder) not in known
        for name in PACKAGES
        for ending in (f"{name}/__init__.py", f"{name}.py")
    )
    return [path for path in found if os.access(path, os.R_OK) and path.is_file()]
