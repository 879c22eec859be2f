"""The HTTP services: status API with its page, and the reward service."""
