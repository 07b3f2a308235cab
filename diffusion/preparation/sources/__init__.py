"""What pictures come from, and how it is read."""
