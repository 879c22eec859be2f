"""Reports of runs that people show to each other: one page for many runs, and a comparison of two."""
