"""Images and captions to prepared data, and prepared to encoded data."""
