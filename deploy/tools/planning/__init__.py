"""How long a run takes: which side waits, how long scoring takes, and the whole plan."""
