"""Averages of the weights: their profiles, the callback that updates them, and any width after the training."""
