"""What a run left behind, in the form that the page shows: curves, configs, evaluations with images, files."""
