"""From rewards to weights: credit, advantages, loss, the update, and the training loop on one page."""
