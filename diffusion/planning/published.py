"""Figures of the systems that this package reproduces, as their write-ups give them, and what contradicts them.

M2: MosaicML, "Training Stable Diffusion from Scratch for <$50k, part 2". MT: its benchmark tables. B: BRIA AI 2.0 on
SageMaker. W: Stability AI on WEKA. S: model card of Stable Diffusion 2.
"""

from typing import NamedTuple

# MT: the U-Net alone, latents computed beforehand, fp16, global batch 2,048, at most 16 images per GPU at a time.

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

ORIGINAL_A100_HOURS = 200_000
"""GPU hours of Stable Diffusion 2's own training."""

EARLIER_COST = 160_000
"""In dollars, of MosaicML's earlier estimate for the same model."""


class Claim(NamedTuple):
    """A published figure."""

    subject: str
    figure: str
    source: str
    note: str = ""
    """Contradictions and conditions."""

    def __str__(self) -> str:
        return f"{self.subject}: {self.figure} ({self.source}){'; ' if self.note else ''}{self.note}"


_PUBLISHED = TRAINING_A100_HOURS + LATENTS_A100_HOURS

CLAIMS = (
    Claim(
        "published run",
        "20,051 A100-hours, 3,784 more for latents, $47.7k, 7.45 days on 128 A100",
        "M2",
        f"20,051 hours are {TRAINING_A100_HOURS / 128 / 24:.2f} days on 128 A100, both {_PUBLISHED / 128 / 24:.2f}; at "
        "the rates of MT training takes 16,937 hours",
    ),
    Claim(
        "phases of it",
        "1.6 days for 550,000 steps at 256 px, 4.9 for 850,000 at 512 px",
        "M2",
        "at the rates of MT 1.12 and 4.39 days",
    ),
    Claim(
        "against the earlier estimate",
        "3 times cheaper",
        "M2",
        f"$160k against $47.7k are {EARLIER_COST / (_PUBLISHED * PRICE_PER_A100_HOUR):.1f}",
    ),
    Claim(
        "against Stable Diffusion 2",
        "8 times fewer GPU-hours",
        "M2, S",
        f"200,000 A100-hours against {_PUBLISHED:,} are {ORIGINAL_A100_HOURS / _PUBLISHED:.1f}; against training alone "
        f"{ORIGINAL_A100_HOURS / TRAINING_A100_HOURS:.1f}",
    ),
    Claim("latents encoded while training", "1.4 times the time and cost", "MT"),
    Claim(
        "utilisation",
        "above 98 % over the whole run; 93 %",
        "B; W",
        "neither says whether of busy time or of arithmetic",
    ),
    Claim(
        "steps per second",
        "1.8 of 2,048 images on four p4de, with 8 images per GPU and 2 accumulated",
        "B",
        "8 x 2 x 32 GPUs are 512 images, not 2,048, which takes the 128 GPUs of the whole run",
    ),
    Claim(
        "storage", "95 % less per TB", "W", "80 % of the cost at 15 times the capacity, in the same text, are 94.7 %"
    ),
    Claim("storage", "1.3 million IOPS and 18 GB/s from six nodes", "W"),
    Claim(
        "training time with it",
        "35 % shorter",
        "W",
        "2 to 3 weeks of a 12-week cycle, in the same text, are 17 to 25 %",
    ),
)
