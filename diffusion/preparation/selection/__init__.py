"""Which pictures are kept: measures, scores, captions, filters, duplicates, buckets."""
