"""Whether a trained model is any good."""
