"""One training run from start to end, on Ray or in one process."""
