"""What accompanies training: addresses, samples, metrics, records."""
