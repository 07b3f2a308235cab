"""Time, memory, storage and price of a run, before it starts."""
