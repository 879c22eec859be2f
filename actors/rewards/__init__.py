"""Reward actors: a queue and a pool for each scorer."""
