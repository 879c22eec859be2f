"""Scorers that ask a vision-language model questions about an image."""
