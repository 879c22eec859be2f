"""Commands that work on a run, a model or a machine without training."""
