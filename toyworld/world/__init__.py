"""The toy world itself: scenes, prompts, captions, words, and an exact detector."""
