"""A preset, a scorer and prompts that a user starts from."""
