"""From images with captions to batches."""
