"""Training and export of the toy world's models; no run needs this."""
