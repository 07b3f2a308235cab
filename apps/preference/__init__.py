"""Which of two models people prefer, asked blind: pairs, votes, the page that asks, and the statistics."""
