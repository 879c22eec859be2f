"""The figures of the docs."""
