"""How fast `encode` is beside the bare networks on batches that lie ready."""

import io
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.timing import ratios, timed
from diffusion.config.data import ImageSize
from diffusion.config.model import Architecture
from diffusion.models.architectures import ARCHITECTURES, build_text_encoder, build_vae, with_seed
from diffusion.models.pretrained import freeze
from diffusion.models.tokenizers import build_tokenizer, tokenize
from diffusion.preparation.encoding.encode import encode
from diffusion.preparation.encoding.images import ImageBatch
from diffusion.preparation.encoding.models import Encoder, EncodingModels
from diffusion.preparation.prepare import prepare


def measure_encoding(
    *,
    num_images: int = 32,
    image_side: int = 320,
    resolution: int = 256,
    batch_size: int = 8,
    num_workers: int = 1,
    device: str = "cpu",
    precision: str = "fp32",
    architecture: Architecture = Architecture.stable_diffusion_2,
    text_embeddings: bool = False,
    rounds: int = 3,
) -> dict[str, Any]:
    """Time `encode` and the bare forward passes in turn.

    Bare: the same networks on the same number of batches of the same shape, uint8 in host memory, to moments in host
    memory; nothing is decoded, tokenized or written. `encode` is everything: start of the loader workers, decoding,
    transform, tokens, forward passes, shards on the disk, manifest.

    Args:
        num_images: JPEG images of noise.
        image_side: Their side in pixels.
        resolution: Side that they are encoded at.
        batch_size: Images of a forward pass.
        num_workers: Loader processes.
        device: Torch device.
        precision: `fp32` or `bf16`.
        architecture: Whose VAE (and text encoder) with random weights.
        text_embeddings: Run the text encoder, too.
        rounds: Times that each is measured; the median of the ratios of neighbours counts.

    Returns:
        `ratio` (rate of `encode` over the bare one), `ratios`, and the same of processor time (`timing.ratios`), that
        of the loader workers included; `encode_per_second` and `bare_per_second` (images, the best of the rounds),
        and the settings.
    """
    settings = {name: value for name, value in locals().items() if name != "rounds"}
    models = _models(architecture, text_embeddings)
    with tempfile.TemporaryDirectory() as folder:
        prepared = _prepared(Path(folder), num_images, image_side, resolution)
        encoder = Encoder(models, device, precision)
        batches = _batches(models, num_images, resolution, batch_size)
        _bare(encoder, batches[:1])
        bare, whole = [], []
        for i in range(rounds):
            options: dict[str, Any] = {"device": device, "precision": precision, "num_workers": num_workers}
            options |= {"models": models, "resolutions": [resolution], "batch_size": batch_size}
            bare.append(timed(partial(_bare, encoder, batches)))
            whole.append(timed(partial(encode, prepared, Path(folder, f"out-{i}"), **options)))
    return {
        **ratios(bare, whole),
        "encode_per_second": num_images / min(one.clock for one in whole),
        "bare_per_second": num_images / min(one.clock for one in bare),
        **settings,
        "architecture": architecture.value,
    }


def _models(architecture: Architecture, text_embeddings: bool) -> EncodingModels:
    """Build networks with random weights; their identities are not needed."""
    spec, tokenizer = ARCHITECTURES[architecture], build_tokenizer(architecture)
    text_encoder = freeze(with_seed(1, lambda: build_text_encoder(spec))) if text_embeddings else None
    return EncodingModels(
        vae=freeze(with_seed(0, lambda: build_vae(spec))),
        vae_identity="random",
        tokenize=lambda captions: tokenize(tokenizer, captions),
        tokenizer_identity="random",
        empty_ids=tokenize(tokenizer, [""])[0].tolist(),
        text_encoder=text_encoder,
        text_encoder_identity=text_encoder and "random",
    )


def _prepared(folder: Path, number: int, side: int, resolution: int) -> Path:
    """Write and prepare images of smooth noise with a caption each."""
    source = folder / "source"
    source.mkdir()
    for i in range(number):
        noise = np.random.default_rng(i).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        image, data = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC), io.BytesIO()
        image.save(data, "JPEG", quality=90)
        (source / f"{i:06}.jpg").write_bytes(data.getvalue())
        (source / f"{i:06}.txt").write_text(f"smooth noise, number {i}")
    prepare([source], folder / "prepared", edges=[resolution], num_workers=1)
    return folder / "prepared"


def _batches(models: EncodingModels, number: int, resolution: int, batch_size: int) -> list[ImageBatch]:
    """Make batches that lie ready."""
    batches, size = [], ImageSize(resolution, resolution)
    pin = torch.cuda.is_available()
    for i in range(math.ceil(number / batch_size)):
        count = min(batch_size, number - i * batch_size)
        images = torch.randint(256, (count, 3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(i))
        token_ids = [torch.from_numpy(models.tokenize(["smooth noise"]))] * count
        placements = {size: torch.zeros((count, 6), dtype=torch.int32)}
        images = {size: images.pin_memory() if pin else images}
        batches.append(ImageBatch(i, 0, images, placements, token_ids, [""] * count, {}, []))
    return batches


def _bare(encoder: Encoder, batches: list[ImageBatch]) -> None:
    """Run the forward passes; wait once, at the end."""
    for encoded in [encoder.start(batch) for batch in batches]:
        encoded.wait()
