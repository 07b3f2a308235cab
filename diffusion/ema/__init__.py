"""What changes training itself: averaging of the weights."""
