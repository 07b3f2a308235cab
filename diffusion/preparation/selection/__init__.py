"""Which images are kept: measures, scores, captions, filters, duplicates, buckets."""
