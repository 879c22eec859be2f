"""How the program starts: its own packages are found first, whatever else has their names."""
