"""The demo: a small data set of captioned shapes, drawn on the spot, and an oracle that checks what a model draws."""
