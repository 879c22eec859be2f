"""Which runs have a warm process; `tests/deploy/run/test_local_cluster.py` shows what Ray makes of it."""

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deploy.run.warm.workers import has_forks, warm_python
from protocol.config.run import RunConfig
from tests.support.waiting import wait_until

Config = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def as_users_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the warm process of all tests."""
    for name in (
        "RAY_ADDRESS",
        "RAY_RUNTIME_ENV_HOOK",
        "RAY_prestart_worker_first_driver",
        "OMP_NUM_THREADS",
        "UV_RUN_RECURSION_DEPTH",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.skipif(sys.platform != "linux", reason="forks after imports are for Linux")
@pytest.mark.parametrize("own", [None, "8"])
def test_the_threads_of_a_warm_process_share_two_heaps_unless_the_user_says_otherwise(
    own: str | None, tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if own:
        monkeypatch.setenv("MALLOC_ARENA_MAX", own)
    before = psutil.Process().children()
    with warm_python(tiny_config()):
        (process,) = [child for child in psutil.Process().children() if child not in before]
        wait_until(lambda: bool(process.environ()))  # empty for a moment while the program is loaded
        assert process.environ()["MALLOC_ARENA_MAX"] == (own or "2")


@pytest.mark.parametrize(
    ("sections", "variables", "is_local"),
    [
        ({}, {}, True),
        ({"cluster": {"address": "127.0.0.1:1"}}, {}, False),
        ({}, {"RAY_ADDRESS": "127.0.0.1:1"}, False),
        ({}, {"RAY_RUNTIME_ENV_HOOK": "mine.hook"}, False),
        ({}, {"UV_RUN_RECURSION_DEPTH": "1"}, False),
        ({}, {"OMP_NUM_THREADS": "2"}, False),
        ({}, {"OPENBLAS_NUM_THREADS": "2"}, False),
        ({"cluster": {"learner": {"cpus": 2}}}, {}, False),
        ({"rewards": {"a": {"scorer": "geneval", "cpus": 2.5}}}, {}, False),
        ({"cluster": {"rollout": {"gpus": 1}}}, {}, False),
        ({"cluster": {"learner": {"gpus": 0.5}}}, {}, False),
        ({"rewards": {"a": {"scorer": "geneval", "runtime_env": {"pip": ["x"]}}}}, {}, False),
    ],
)
def test_no_warm_process_where_forks_are_unsafe_or_of_no_use(
    tiny_config: Config,
    monkeypatch: pytest.MonkeyPatch,
    sections: dict[str, object],
    variables: dict[str, str],
    is_local: bool,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = psutil.Process().children()
    with warm_python(tiny_config(**sections), is_local=is_local) as python:
        assert python is None
        assert psutil.Process().children() == before


def test_a_run_whose_warm_process_cannot_start_goes_on_without(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with warm_python(tiny_config()) as python:
        assert python is None


def test_packages_of_our_names_elsewhere_keep_workers_from_being_forks(
    tiny_config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert has_forks(tiny_config())
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert not has_forks(tiny_config())
