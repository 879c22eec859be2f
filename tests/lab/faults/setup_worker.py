"""Stands in for Ray's `setup_worker.py` on the machines of a lab: workers are forks of their machine's warm process.

The first worker of a machine starts that process. On a machine with a folder `odd` in its home, whose workers import
other libraries, each worker is a process of its own.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(os.environ.get("LAB_SHARED_DISK", "")) / "warm"
LIBRARIES = ("torch", "diffusers", "transformers.modeling_utils", "peft")
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def door() -> Path:
    """Return the socket of this machine's warm process, which is started if there is none."""
    address = Path("/tmp") / f"warm-{os.stat('/proc/self/ns/pid').st_ino}" / "door"
    try:
        address.parent.mkdir()
    except FileExistsError:
        return address
    words = [sys.executable, str(HERE / "process.py"), str(address), *LIBRARIES]
    subprocess.Popen(
        ["bash", "-c", f"sleep infinity | exec {shlex.join(words)}"],  # it ends with its machine
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OPENBLAS_NUM_THREADS": "1"},
        start_new_session=True,
    )
    end = time.monotonic() + 30
    while not address.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return address


def command() -> str:
    """Return what bash has to do, as Ray's own script would, but with another Python."""
    words = [word for word in sys.argv[1:] if not word.startswith((CONTEXT, LANGUAGE))]
    contexts = [word.removeprefix(CONTEXT) for word in sys.argv if word.startswith(CONTEXT)]
    if not contexts:  # a server of Ray's
        return "exec " + shlex.join([sys.executable, *words])
    context = json.loads(contexts[0])
    for name, value in context["env_vars"].items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    python = context["py_executable"]
    if python == sys.executable and not (Path.home() / "odd").exists():
        python = shlex.join([sys.executable, "-S", "-E", str(HERE / "start.py"), str(door())])
    return " ".join([*context["command_prefix"], "exec", python, shlex.join(words)])


if __name__ == "__main__":
    os.execvp("bash", ["bash", "-c", command()])
