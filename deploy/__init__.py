"""How it is started, watched and steered: the command line, run folders, presets."""
