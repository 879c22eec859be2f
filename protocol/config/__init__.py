"""The config tree: one section a file, read and checked before anything starts."""
