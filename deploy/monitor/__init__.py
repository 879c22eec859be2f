"""What a run reports while it is in progress, and how it carries out commands."""
