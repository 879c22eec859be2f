"""Scenes that take minutes each run only when they are asked for."""

import os

import pytest

long_scene = pytest.mark.skipif(
    os.environ.get("LONG_SCENES") != "1", reason="a scene that takes minutes: LONG_SCENES=1 runs it"
)
