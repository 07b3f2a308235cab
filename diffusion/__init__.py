"""Train Stable-Diffusion-class text-to-image models from scratch, reproducibly on any number of GPUs."""

__version__ = "0.3.0"
