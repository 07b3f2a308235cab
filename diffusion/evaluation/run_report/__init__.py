"""One page about a run: what was planned, what came of it, and how it went."""
