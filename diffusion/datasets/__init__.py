"""From pictures with captions to batches."""
