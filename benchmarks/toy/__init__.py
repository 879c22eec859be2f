"""Gains and images of the toy world's presets."""
