"""The run folder: who may write it, what it holds, and how it is read."""
