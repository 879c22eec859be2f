"""From rewards to the next adapter: credit, advantages, loss, the update, and the training loop."""
