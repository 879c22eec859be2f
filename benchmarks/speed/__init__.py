"""Speed and memory of models, rewards and the status service."""
