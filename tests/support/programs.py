"""Programs that some tests need and pip cannot install."""

import os
import shutil
from collections.abc import Mapping
from types import MappingProxyType

import pytest

PACKAGES: Mapping[str, str] = MappingProxyType(
    {
        "redis-server": "redis-server",
        "chromium-headless-shell": "chromium-headless-shell",
        "chromedriver": "chromium-driver",
        "promtool": "prometheus",
        "gcc": "build-essential",
        "ip": "iproute2",
        "wget": "wget",
    }
)
"""Debian package of each program. `.ci/run` installs the same packages."""


def need(program: str) -> str:
    """The path of a program. Without it, a test is skipped, and fails where CI=true."""
    path = shutil.which(program)
    if path is not None:
        return path
    message = f"{program} is not installed: apt-get install {PACKAGES[program]}"
    if os.environ.get("CI") == "true":
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
