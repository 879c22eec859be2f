"""The config tree: one file for each section. A run reads and checks the whole tree before it starts anything."""
