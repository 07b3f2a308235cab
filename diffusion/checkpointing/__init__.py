"""Checkpoints: their layout, how they are saved, found, read, resumed from and rolled back to."""
