"""A pool of Ray actors: calls with deadlines, heartbeats, replacement of crashed actors, resizing."""
