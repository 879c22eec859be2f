"""The history of runs in the form that the page shows: curves, configs, evaluations with images, files."""
