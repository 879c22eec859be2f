"""Workers of a local Ray cluster as forks of one process that has imported the large libraries."""
