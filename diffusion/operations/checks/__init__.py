"""Checks of machines, GPUs, data and ranks, in one registry."""
