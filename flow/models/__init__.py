"""Pretrained text-to-image models behind one contract: find and load them, encode prompts, decode images."""
