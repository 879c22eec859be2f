"""Every package of the tested environment is pinned, so that an install of today is also one of next year."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

EXTRAS = frozenset({"dev", "docs"})
"""What the README and CI install."""


def _needed(name: str, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> Iterator[str]:
    """Yield what a package needs here, and what that needs as far as it is installed."""
    if (name, extras) in seen:
        return
    seen.add((name, extras))
    try:
        found = requires(name) or ()
    except PackageNotFoundError:  # `make test` installs nothing for the docs
        return
    for needed in map(Requirement, found):
        if not needed.marker or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            own = canonicalize_name(needed.name)
            yield own
            yield from _needed(own, frozenset(needed.extras), seen)


def test_every_package_that_an_install_brings_is_pinned() -> None:
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    needed = set(_needed("flowcredit", EXTRAS, set())) - {"flowcredit"}
    assert {"torch", "pytest-xdist", "numpy"} <= needed
    assert needed <= {canonicalize_name(each) for each in pinned}
