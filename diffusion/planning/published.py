"""Published figures that plans start from, of MosaicML's write-up and its benchmark tables (docs/planning.md)."""

# The U-Net alone, latents computed beforehand, fp16, global batch 2,048, at most 16 images per GPU at a time.

A100_RATES = {
    8: {256: 1_100, 512: 290},
    16: {256: 2_180, 512: 585},
    32: {256: 4_080, 512: 1_195},
    64: {256: 8_530, 512: 2_340},
    128: {256: 11_600, 512: 4_590},
}
"""Images per second by number of A100 and resolution."""

PRICE_PER_A100_HOUR = 2.0
"""In dollars."""

TRAINING_A100_HOURS, LATENTS_A100_HOURS = 20_051, 3_784
"""GPU hours of the published run: training, and latents computed beforehand."""

HARDWARE_FAILURES = 2
"""Failures in the published run's training: few to estimate a rate from."""
