"""Triton kernels, independent of the rest of the package."""
