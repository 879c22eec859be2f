"""Judging images: the scorer contract, and one module for each scorer."""
