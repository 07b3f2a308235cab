"""Sweeps: the same run at several points of its configuration."""
