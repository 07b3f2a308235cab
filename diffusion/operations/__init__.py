"""Running unattended: signs of life, supervision and restarts, going back after a loss that is no number."""
