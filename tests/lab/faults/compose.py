"""The services of compose.yaml on the machines of a lab: commands, environments, health checks and restarts.

There are no containers. Each machine has the name of its service. The test's Python installation and the project's
wheel stand for the image, and the home of a machine for its volumes.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.lab.faults.cluster import SERVICE
from tests.lab.faults.lab import BUSY, HOME, STORE, Lab, Machine
from tests.support.paths import ROOT
from tests.support.wheel import unpack_wheel

MAIN = r"^bash -c while"
"""Command line of the process that starts a service, and starts it again."""


class Services:
    """The services; made, they are starting."""

    def __init__(self, lab: Lab, secrets: Mapping[str, str]) -> None:
        compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
        self._services: dict[str, Any] = _filled(compose["services"], {"TAG": "latest", **secrets})
        self.machines: dict[str, Machine] = dict(zip(self._services, lab.machines, strict=True))
        unpack_wheel(lab.store / "flowcredit")
        for name, machine in self.machines.items():
            lab.call(machine, name)
            machine.variables |= BUSY | self._services[name]["environment"] | {"PYTHONPATH": f"{STORE}/flowcredit"}
        for name, machine in self.machines.items():
            words = [HOME if word == "/data" else word for word in self._services[name]["command"]]
            machine.start(["bash", "-c", SERVICE, "service", *words], log=machine.files / "service.log")

    def start(self, name: str, *words: str, log: Path | None = None) -> "subprocess.Popen[str]":
        """Start a command in a service, as `docker compose exec` does."""
        return self.machines[name].start(words, beside=MAIN, log=log)

    def run(self, name: str, *words: str) -> str:
        """Run a command in a service; what it said."""
        return self.machines[name].run(words, beside=MAIN, timeout_s=300)

    def is_healthy(self, name: str) -> bool:
        """Whether a service's health check succeeds."""
        if not self.machines[name].processes(MAIN):
            return False
        kind, *words = self._services[name].get("healthcheck", {}).get("test") or ("CMD", *_check_of_the_image())
        check = self.start(name, *(words if kind == "CMD" else ["bash", "-c", *words]))
        check.communicate(timeout=120)
        return check.returncode == 0


def _filled(node: Any, values: Mapping[str, str]) -> Any:
    """Replace variables by their values after the file is parsed, as Compose does."""
    if isinstance(node, dict):
        return {key: _filled(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(each, values) for each in node]
    return re.sub(r"\$\{(\w+)[^}]*\}", lambda found: values[found[1]], node) if isinstance(node, str) else node


def _check_of_the_image() -> Sequence[str]:
    (words,) = re.findall(r"^HEALTHCHECK .*?CMD (\[.*?\])$", (ROOT / "Dockerfile").read_text(), re.M | re.S)
    return json.loads(words)
