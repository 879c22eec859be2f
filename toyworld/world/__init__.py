"""The toy world itself: scenes, prompts, captions, signs, and a detector."""
