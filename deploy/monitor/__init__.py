"""What a run tells about itself while it goes, and what it can be asked to do."""
