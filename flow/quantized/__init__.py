"""The frozen transformer in 8 or 4 bits a weight."""
