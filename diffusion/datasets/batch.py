"""Names of the entries of a training batch."""

from enum import Enum


class BatchKey(str, Enum):
    """Keys of the dictionary that the loader yields and the model reads.

    B is the batch size, C the channels of the latent, H and W its height and width, L the tokens of a caption.
    """

    IMAGE = "image"
    """uint8 [B, 3, 8H, 8W]: RGB pictures, when training from images."""

    LATENT_MEAN = "latent_mean"
    """float16 [B, C, H, W]: mean of the VAE's posterior, not scaled, when training from latents."""

    LATENT_LOGVAR = "latent_logvar"
    """float16 [B, C, H, W]: log-variance of the VAE's posterior; absent where only the mean was stored."""

    TOKEN_IDS = "token_ids"
    """int64 [B, L]: the caption, padded to the tokenizer's length."""

    SAMPLE = "sample"
    """int64 [B]: the address of each sample, made by `diffusion.randomness.sample_address`."""

    STEP = "step"
    """int64 [B]: the optimizer step that the sample is used in; 0 while evaluating."""

    STREAM = "stream"
    """int64 [B]: index of the stream (resolution bucket) that the sample came from."""
