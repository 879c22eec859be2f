"""The first minutes on a GPU: `python -m benchmarks.speed.slot`."""
