"""Figures that others published about this recipe, to plan from where nothing has been measured.

From MosaicML's "Training Stable Diffusion from Scratch for <$50k, part 2" and its benchmark tables: the U-Net alone,
latents computed beforehand, fp16, global batch 2,048, at most 16 images per GPU at a time.
"""

from diffusion.planning.fleets import Fleet

A100_RATES = {
    8: {256: 1_100, 512: 290},
    16: {256: 2_180, 512: 585},
    32: {256: 4_080, 512: 1_195},
    64: {256: 8_530, 512: 2_340},
    128: {256: 11_600, 512: 4_590},
}
"""Images per second of so many A100, by resolution."""

PRICE_PER_A100_HOUR = 2.0
"""In dollars."""

A100_MEMORY_BYTES = 80e9

TRAINING_A100_HOURS, LATENTS_A100_HOURS = 20_051, 3_784
"""What the published run took: training, and latents computed beforehand."""

HARDWARE_FAILURES = 2
"""Of the published run, in so many A100-hours of training: few to estimate a rate from."""

A100_FLEETS = [
    Fleet(
        name=f"{num_gpus} A100",
        num_gpus=num_gpus,
        price_per_gpu_hour=PRICE_PER_A100_HOUR,
        gpu_memory_bytes=A100_MEMORY_BYTES,
        images_per_second={side: float(rate) for side, rate in rates.items()},
        source="published table",
    )
    for num_gpus, rates in A100_RATES.items()
]
