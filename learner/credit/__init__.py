"""From the rewards of an iteration to advantages: pure functions over dense tables."""
