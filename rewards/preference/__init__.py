"""Scorers that read an image and its prompt together: ImageReward and HPSv3."""
