"""Boards to test against: the embedded Valkey and, where it is installed, Debian's Redis with a password."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from deploy.board_server import BoardServer


@pytest.fixture(scope="module", params=["valkey", "redis with a password"])
def board_url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("board")
    if request.param == "valkey":
        server = BoardServer(folder)
        server.start()
        yield server.url
        server.stop()
        return
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    socket = folder / "r.sock"
    words = [program, "--port", "0", "--unixsocket", str(socket), "--requirepass", "secret-word", "--save", ""]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL)
    yield f"unix://:secret-word@{socket}"
    process.terminate()
    process.wait(10)
