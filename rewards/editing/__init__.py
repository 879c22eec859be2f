"""Scorers of edited images, which compare an image with the condition images of its prompt."""
