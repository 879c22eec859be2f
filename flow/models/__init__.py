"""Pretrained text-to-image models with one contract: find and load them, encode prompts, decode images."""
