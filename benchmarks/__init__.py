"""Measurements: each is a command that prints its figures; nothing here is a test."""
