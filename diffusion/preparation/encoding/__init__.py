"""Prepared pictures to latents and token ids."""
