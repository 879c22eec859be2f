"""Brings a run's results to this machine: from its store (`checkpoint.url`), or from the head of a cluster by a job.

The fetched folder is a run folder with the newest checkpoint: `generate`, `export`, `eval` and `serve` take it.
"""

import base64
import hashlib
import shlex
import shutil
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO

from deploy.folder.mirror import Mirror
from deploy.folder.names import CHECKPOINTS, CONFIG
from deploy.jobs import pack
from deploy.jobs.follow import follow
from deploy.jobs.submit import cluster_errors, connect
from protocol.errors import RunFolderError
from protocol.ground.files import whole, writing


def fetch(run: str, into: Path, *, address: str | None) -> Path:
    """Fetch a run into a new folder.

    Args:
        run: address of a store (`s3://bucket/run`), an absolute path on the head, or a name in its folder of runs.
        address: the cluster's job server, unless `run` is the address of a store; None takes Ray's variables.

    Raises:
        RunFolderError: there is no such run, the copy is broken, or `into` exists or cannot be made.
        ConfigError: the cluster does not answer.
        CheckpointError: the store's copies are damaged.
    """
    if into.exists():
        raise RunFolderError(f"the folder {into} must not exist: give another one with --into, or remove it")
    with writing(into, "--into"):
        into.parent.mkdir(parents=True, exist_ok=True)
    with whole(into, is_shared=True) as partial:
        with writing(into, "--into"):
            partial.mkdir()
        if "://" in run:
            _from_store(run, partial)
        else:
            _from_cluster(run, partial, address)
    return into


def _from_store(url: str, folder: Path) -> None:
    store = Mirror(url)
    config = store.config()
    if config is None:
        raise RunFolderError(f"the store {url} holds no run: give the checkpoint.url of a run")
    (folder / CONFIG).write_text(config, encoding="utf-8")
    (folder / CHECKPOINTS).mkdir()
    store.pull(folder)


def _from_cluster(run: str, folder: Path, address: str | None) -> None:
    client = connect(address)
    with tempfile.TemporaryDirectory() as code:
        shutil.copy(pack.__file__, Path(code) / "pack.py")
        with cluster_errors(address):
            job = client.submit_job(entrypoint=f"python pack.py {shlex.quote(run)}", runtime_env={"working_dir": code})
    with tempfile.TemporaryFile() as archive:
        received = Received(archive)
        try:
            code_ended = follow(client, job, say=received.take)
        finally:
            with suppress(OSError, RuntimeError):
                client.delete_job(job)
        received.require_whole(run, code_ended)
        archive.seek(0)
        with writing(folder, "--into"), tarfile.open(fileobj=archive) as tar:
            tar.extractall(folder, filter="data")


class Received:
    """The archive that a job prints, put together from its log."""

    def __init__(self, archive: IO[bytes]) -> None:
        self._archive = archive
        self._sha = hashlib.sha256()
        self._rest = ""
        self._messages: list[str] = []
        self._digest: str | None = None

    def take(self, text: str) -> None:
        """Take the next piece of the log, which may end inside a line."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.startswith(pack.DATA):
                piece = base64.b64decode(line.removeprefix(pack.DATA))
                self._archive.write(piece)
                self._sha.update(piece)
            elif line.startswith(pack.WHOLE):
                self._digest = line.removeprefix(pack.WHOLE)
            else:
                self._messages.append(line)

    def require_whole(self, run: str, code: int) -> None:
        """Check that the whole archive has arrived.

        Raises:
            RunFolderError: it has not; the job's exit code and its last message are in the error.
        """
        refused = [line.removeprefix(pack.REFUSED) for line in self._messages if line.startswith(pack.REFUSED)]
        if refused:
            raise RunFolderError(refused[0])
        if code or self._digest != self._sha.hexdigest():
            reason = next((line for line in reversed(self._messages) if line.strip()), "it printed nothing")
            raise RunFolderError(f"run {run} could not be fetched, its job ended with {code}: {reason}; try it again")
