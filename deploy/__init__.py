"""Start, watch and control runs: the command line, run folders, presets, services."""
