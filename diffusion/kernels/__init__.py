"""Operators of our own that torch lacks; they know torch and Triton, and nothing else of the project."""
