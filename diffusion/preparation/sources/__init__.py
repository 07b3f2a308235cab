"""What images come from, and how it is read."""
