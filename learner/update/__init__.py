"""From advantages to the next adapter: micro-batches, objective, optimizer, statistics."""
