"""What Ray starts a worker with in tests: as `deploy/run/warm/start.py`, and it leaves a file beside the socket, named
after the raylet and the worker, which is no child of the raylet.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "deploy" / "run" / "warm"))

from client import fork

address, *words = sys.argv[1:]
try:
    worker, _ = fork(address, words, os.getcwd(), dict(os.environ), [0, 1, 2])
except OSError:
    os.execv(sys.executable, [sys.executable, *words])
open(os.path.join(os.path.dirname(address), f"{os.getppid()}.{worker}"), "x").close()
