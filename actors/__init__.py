"""Where it runs: Ray shells that forward to plain classes one layer down, and the pools that keep them alive."""
