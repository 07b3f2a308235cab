"""Prepared images to latents and token ids."""
