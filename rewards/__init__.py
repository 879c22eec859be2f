"""Score images: the scorer contract, and the built-in scorers."""
