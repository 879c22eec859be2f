"""Several machines in one: network namespaces on a bridge, each with its own address, host name, /tmp, home and clock.

    with Lab(folder, machines=4) as lab:
        head = lab.machines[0]
        head.start(["ray", "start", "--head", "--block"])
        lab.machines[3].run(["python", "-c", "..."])
        lab.machines[1].cut()

Machines share the Python installation and nothing of this repository: its folder is empty on them. Ray's workers with
the runtime environment of a job are forks of a warm process of their machine. It needs root on
Linux with `ip` and `unshare`.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from deploy.run.warm.workers import HERE as WARM
from tests.lab.faults import setup_worker
from tests.lab.faults.clock import wrong_clock
from tests.support.paths import ROOT

NETWORK = "10.77.0"
HOME = "/home/lab"
STORE = "/srv/store"
"""A disk that all machines share, for those who ask for it."""
BUSY = {
    "OMP_NUM_THREADS": "1",
    "RAY_worker_niceness": "0",  # with Ray's 15 a busy host starves the actors
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Variables of processes on machines that share few cores."""
WORKERS = str(Path(find_spec("ray").origin).parent / "_private" / "workers")
"""Folder of the script with which Ray starts a worker."""
LABS = map("abcdefghij".__getitem__, range(10))
"""Several labs of one process have networks of their own."""
INSIDE = """
set -e
mount --make-rprivate /
mount -t tmpfs -o size=1m none /mnt
mount --bind "$LAB_HOSTS" /etc/hosts
mkdir /mnt/python /mnt/tmp /mnt/home /mnt/store
mount --bind "$LAB_PYTHON" /mnt/python
mount --bind "$LAB_FILES/tmp" /mnt/tmp
mount --bind "$LAB_FILES/home" /mnt/home
mount --bind "$LAB_STORE" /mnt/store
mount --bind /mnt/tmp /tmp
mount -t tmpfs -o size=1m none /home
mount -t tmpfs -o size=1m none /srv
mkdir -p "$HOME" "$LAB_SHARED_DISK"
mount --bind /mnt/home "$HOME"
mount --bind /mnt/store "$LAB_SHARED_DISK"
case "$LAB_ROOT" in /tmp/*) ;; *) mount -t tmpfs -o size=1m none "$LAB_ROOT" ;; esac
mkdir -p "$LAB_PYTHON"
mount --bind /mnt/python "$LAB_PYTHON"
mount --bind "$LAB_SHARED_DISK/warm/setup_worker.py" "$LAB_WORKERS/setup_worker.py"
hostname "$LAB_NAME"
cd "$HOME"
LD_PRELOAD=${LAB_PRELOAD:-} exec "$@"
"""
"""What a process does first on its machine: it binds that machine's folders over its own."""


class NoLabError(Exception):
    """This machine cannot hold others."""


@dataclass
class Machine:
    """One machine; made by `Lab`."""

    number: int
    prefix: str
    files: Path
    store: Path
    variables: dict[str, str] = field(default_factory=dict)
    """Further environment variables of all its processes."""

    @property
    def name(self) -> str:
        """Host name."""
        return f"m{self.number}"

    @property
    def address(self) -> str:
        """IP address."""
        return f"{NETWORK}.{self.number}"

    @property
    def home(self) -> Path:
        """Its home, as the test sees it."""
        return self.files / "home"

    @property
    def namespace(self) -> str:
        """Its network namespace."""
        return f"{self.prefix}n{self.number}"

    @property
    def link(self) -> str:
        """The bridge's end of its cable."""
        return f"{self.prefix}v{self.number}"

    def start(
        self,
        words: Sequence[str],
        *,
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
        beside: str = "",
    ) -> "subprocess.Popen[str]":
        """Start a process.

        Args:
            words: command.
            log: file for what it says; default: a pipe.
            variables: further environment variables.
            beside: pattern of the command line of a process that it sees, and that sees it; default: it sees none.

        Returns:
            The process.
        """
        if beside:
            command = ["nsenter", "--target", str(self.processes(beside)[0].pid), "--net", "--mount", "--uts", "--pid"]
            command += ["bash", "-c", 'cd "$HOME" && LD_PRELOAD=${LAB_PRELOAD:-} exec "$@"', "lab", *words]
        else:
            command = ["ip", "netns", "exec", self.namespace]
            command += ["unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
            command += ["bash", "-c", INSIDE, "lab", *words]
        out = log.open("a") if log else subprocess.PIPE
        try:
            return subprocess.Popen(
                command, env=self._environment(variables or {}), stdout=out, stderr=subprocess.STDOUT, text=True
            )
        finally:
            if log:
                out.close()  # pyright: ignore[reportAttributeAccessIssue]

    def run(
        self,
        words: Sequence[str],
        *,
        timeout_s: float = 120.0,
        variables: Mapping[str, str] | None = None,
        beside: str = "",
        code: int | None = 0,
    ) -> str:
        """Run a process to its end.

        Args:
            words: command.
            timeout_s: seconds until it is killed.
            variables: further environment variables.
            beside: as in `start`.
            code: exit code that it must end with; None takes any.

        Returns:
            What it said.
        """
        process = self.start(words, variables=variables, beside=beside)
        try:
            said, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
            raise AssertionError(f"{words} did not end within {timeout_s:g} s:\n{said}") from None
        assert code is None or process.returncode == code, f"{words} ended with {process.returncode}:\n{said}"
        return said

    def set_clock(self, offset_s: int) -> None:
        """Let the wall clock of all processes that start from now on be so many seconds ahead."""
        self.variables["LAB_PRELOAD"] = f"{STORE}/{wrong_clock(self.store, offset_s).name}"

    def require_clock(self, pattern: str) -> None:
        """Processes match the pattern, and all that do have the clock of `set_clock`."""
        library, found, right = Path(self.variables["LAB_PRELOAD"]).name, 0, []
        for process in self.processes(pattern):
            try:
                loaded = Path(f"/proc/{process.pid}/maps").read_text()
            except OSError:
                continue  # it has ended
            found += 1
            if loaded and library not in loaded:
                right.append(process)
        assert found, f"nothing on {self.name} matches {pattern}"
        assert not right, f"{self.name} has the right clock in {right}"

    def cut(self) -> None:
        """Pull the network cable."""
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        """Put the network cable back."""
        _ip("link", "set", self.link, "up")

    def slow(self, rate: str) -> None:
        """Limit what reaches it and what it sends, `50mbit` for instance."""
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "400ms"]
        _do("tc", "qdisc", "replace", "dev", self.link, *shape)
        _do("ip", "netns", "exec", self.namespace, "tc", "qdisc", "replace", "dev", "eth0", *shape)

    def processes(self, pattern: str = "") -> list[psutil.Process]:
        """Its processes whose command lines match."""
        found = []
        for pid in _do("ip", "netns", "pids", self.namespace).split():
            try:
                process = psutil.Process(int(pid))
                if re.search(pattern, " ".join(process.cmdline())):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def power_off(self) -> None:
        """kill -9 of all its processes; returns when they are gone."""
        until = time.monotonic() + 30
        while processes := self.processes():
            assert time.monotonic() < until, f"{self.name} still has {processes}"
            for process in processes:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(processes, timeout=2)

    def new_disk(self) -> None:
        """Empty its home and its /tmp, as on a new machine."""
        for folder in (self.files / "home", self.files / "tmp"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (self.files / "tmp").chmod(0o1777)

    def _environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": HOME,
            "LANG": "C.UTF-8",
            "LAB_ROOT": str(ROOT),
            "LAB_PYTHON": sys.prefix,
            "LAB_WORKERS": WORKERS,
            "LAB_FILES": str(self.files),
            "LAB_STORE": str(self.store),
            "LAB_HOSTS": str(self.files.parent / "hosts"),
            "LAB_SHARED_DISK": STORE,
            "LAB_NAME": self.name,
            **self.variables,
            **variables,
        }


class Lab:
    """The machines and their network; a context."""

    def __init__(self, folder: Path, *, machines: int) -> None:
        """Raises NoLabError where this cannot be done."""
        _require_rights()
        prefix = f"fc{os.getpid() % 100_000}{next(LABS)}"
        self._bridge = f"{prefix}b"
        (folder / "store").mkdir(parents=True)
        self.store = folder / "store"
        self.machines = [Machine(n, prefix, folder / f"m{n}", self.store) for n in range(1, machines + 1)]

    def __enter__(self) -> "Lab":
        lines = ["127.0.0.1 localhost", *(f"{machine.address} {machine.name}" for machine in self.machines)]
        (self.store.parent / "hosts").write_text("\n".join(lines) + "\n")
        shutil.copytree(WARM, self.store / "warm")
        shutil.copy(Path(setup_worker.__file__), self.store / "warm")
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for machine in self.machines:
                self._add(machine)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def call(self, machine: Machine, name: str) -> None:
        """Let all machines know one by a further name."""
        with (self.store.parent / "hosts").open("a") as file:
            file.write(f"{machine.address} {name}\n")

    def _add(self, machine: Machine) -> None:
        machine.new_disk()
        space, link = machine.namespace, machine.link
        _ip("netns", "add", space)
        _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("link", "set", link, "master", self._bridge, "up")
        _ip("-n", space, "addr", "add", f"{machine.address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def _remove(self) -> None:
        spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
        for machine in self.machines:
            if machine.namespace in spaces:
                machine.power_off()
                _ip("netns", "del", machine.namespace)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


@contextmanager
def laboratory(folder: Path, *, machines: int) -> Iterator[Lab]:
    """A lab for tests. Where there can be none, they are skipped; where CI=true, one that breaks is an error."""
    with ExitStack() as stack:
        try:
            lab = stack.enter_context(Lab(folder, machines=machines))
        except NoLabError as error:
            pytest.skip(f"no laboratory: {error}")
        except OSError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"no laboratory: {error}")
        yield lab


def unplug(machine: Machine, *, seconds: float) -> None:
    """Take a machine's network away for a while."""
    machine.cut()
    try:
        time.sleep(seconds)
    finally:
        machine.mend()


def until(holds: Callable[[], object], what: str, *, seconds: float = 120.0) -> None:
    """Return when something holds; AssertionError, which may be a function's, when it does not in time."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.3)


def _require_rights() -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoLabError("machines as network namespaces need root on Linux")
    if missing := [program for program in ("ip", "tc", "unshare", "nsenter") if shutil.which(program) is None]:
        raise NoLabError(f"not installed: {', '.join(missing)}: apt-get install iproute2 util-linux")
    probe = ["unshare", "--mount", "--uts", "--net", "--pid", "--fork", "--mount-proc", "true"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        raise NoLabError("this machine permits no network, mount and process namespaces")


def _ip(*words: str) -> str:
    return _do("ip", *words)


def _do(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
