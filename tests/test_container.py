"""The container image and compose.yaml: linted, complete, and closed to other machines."""

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    program = Path(sys.executable).parent / "hadolint"
    found = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_the_image_is_built_from_all_that_the_wheel_holds_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert kept == packages | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in kept)


def test_the_image_runs_as_a_user_without_rights_under_an_init_process() -> None:
    stages = (ROOT / "Dockerfile").read_text().split("\nFROM ")
    last = stages[-1].splitlines()
    assert len(stages) == 3, "one stage builds, one runs"
    assert "USER 1000:1000" in last
    assert 'ENTRYPOINT ["/usr/bin/tini", "--"]' in last
    assert any(line.startswith("HEALTHCHECK ") for line in last)
    assert not any("pip install" in line for line in last)


def test_compose_has_the_form_of_its_specification() -> None:
    program = Path(sys.executable).parent / "check-jsonschema"
    command = [program, "--builtin-schema", "vendor.compose-spec", ROOT / "compose.yaml"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_compose_publishes_ports_on_loopback_only() -> None:
    published = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


@pytest.mark.parametrize("name", ["head", "node-1", "node-2"])
def test_ray_nodes_of_compose_ask_for_a_token(name: str) -> None:
    environment = SERVICES[name]["environment"]
    assert environment["RAY_AUTH_MODE"] == "token"
    assert environment["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?"), "without a value compose must not start"


def test_board_and_status_page_of_compose_need_their_secrets() -> None:
    assert SERVICES["status"]["environment"]["FLOWCREDIT_TOKEN"].startswith("${FLOWCREDIT_TOKEN:?")
    command = SERVICES["board"]["command"]
    assert command[command.index("--requirepass") + 1] == "${BOARD_PASSWORD}"
    assert all("healthcheck" in SERVICES[name] for name in ("board", "head", "node-1", "node-2"))


def test_rays_floor_has_the_token_authentication_of_every_recipe() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (ray,) = [each for each in project["project"]["dependencies"] if each.startswith("ray[")]
    floor = tuple(int(part) for part in ray.partition(">=")[2].split("."))
    assert floor >= (2, 59), "a local cluster of Ray 2.52 to 2.58 answers callers without a token"
