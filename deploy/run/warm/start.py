"""Starts a worker of Ray: `python -S -E start.py SOCKET SCRIPT WORD…`. Without a warm process it becomes the worker."""

import os
import sys

from client import fork

address, *words = sys.argv[1:]
try:
    fork(address, words, os.getcwd(), dict(os.environ), [0, 1, 2])
except OSError:
    os.execv(sys.executable, [sys.executable, *words])
