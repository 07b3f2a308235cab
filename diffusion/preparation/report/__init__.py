"""What a preparation kept and refused, as a page and as JSON."""
