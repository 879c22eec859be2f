"""Benchmarks of the toy world: what its demo gains, and how well OCR reads its signs."""
