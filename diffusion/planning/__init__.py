"""What a run will take: images, epochs, days, cost, memory, storage."""
