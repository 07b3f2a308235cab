"""How preparing is cut into partitions, run in parallel, continued and put together."""
