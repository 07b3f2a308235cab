"""Checkpoints: written, found, checked, read, continued from, and kept elsewhere."""
