"""The backbone of each model family: one file with its schedule, its forward and its prompt encoding."""
