"""Small data sets, written by the tests that read them: prepared images and encoded latents in MDS folders."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusion.config.data import DataConfig, Representation, StreamConfig
from diffusion.datasets.encoded import EncodedManifest
from diffusion.datasets.streams import StreamLocation, find_manifest
from diffusion.formats.data_set import BucketEntry, PreparedManifest
from diffusion.formats.shards import (
    ShardFormat,
    encode_sample,
    encode_shard,
    read_index,
    shard_name,
    write_index,
)
from tests.tools.image_files import write_mds

PREPARED = {"image": "bytes", "captions": "json", "width": "int32", "height": "int32", "key": "str", "metadata": "json"}
TEXT = {"token_ids": "ndarray:int32", "key": "str"}
NUM_TOKENS = 5


def tokenize(captions: list[str]) -> np.ndarray:
    """Length, and the first four code points: int32 [K, 5]."""
    return np.array([[len(c), *(ord(c[i]) if i < len(c) else 0 for i in range(4))] for c in captions], np.int32)


def smooth_image(number: int, width: int = 40, height: int = 32) -> Image.Image:
    """An image of smooth noise that belongs to a number."""
    noise = np.random.default_rng(number).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def prepared_sample(name: str, number: int, num_captions: int = 1, data: bytes | None = None) -> dict[str, Any]:
    image = smooth_image(number)
    return {
        "image": png(image) if data is None else data,
        "captions": [f"{number} {name} {k}" for k in range(num_captions)],
        "width": image.width,
        "height": image.height,
        "key": f"{name}/{number}",
        "metadata": {},
    }


def encoded_sample(
    name: str, number: int, *, logvar: bool = True, num_captions: int = 1, size: tuple[int, int] = (4, 4)
) -> dict[str, Any]:
    sample: dict[str, Any] = {
        "latent_mean": np.full((4, *size), number, np.float16),
        "token_ids": tokenize([f"{number} {name} {k}" for k in range(num_captions)]),
        "key": f"{name}/{number}",
    }
    return sample | {"latent_logvar": np.full((4, *size), -number, np.float16)} if logvar else sample


def write_prepared(root: Path, sizes: dict[str, int], num_captions: int = 1, bad: tuple[int, ...] = ()) -> Path:
    """Write ROOT/train/<bucket> with a manifest; images whose number is in `bad` cannot be decoded.

    Returns:
        ROOT/train.
    """
    for name, size in sizes.items():
        samples = [prepared_sample(name, i, num_captions, data=b"no image" if i in bad else None) for i in range(size)]
        write_mds(root / "train" / name, PREPARED, samples)
    write_prepared_manifest(root)
    return root / "train"


def append_prepared(
    folder: Path, samples: Sequence[dict[str, Any]], per_shard: int, compression: str | None = None
) -> None:
    """Append shards of some samples each to ROOT/<split>/<bucket>, and write the manifest, as a growth does."""
    shards = ShardFormat.of(PREPARED, compression=compression)
    entries = read_index(folder).shards if folder.is_dir() else []
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(samples), per_shard):
        encoded = [encode_sample(sample, PREPARED) for sample in samples[start : start + per_shard]]
        content, entry = encode_shard(encoded, shard_name(len(entries)), shards)
        (folder / entry.stored.name).write_bytes(content)
        entries.append(entry)
    write_index(folder, entries)
    write_prepared_manifest(folder.parents[1])


def write_prepared_manifest(root: Path) -> None:
    """Write the manifest of the folders that are there."""
    splits: dict[str, dict[str, BucketEntry]] = {}
    for index_file in sorted(root.glob("*/*/index.json")):
        folder = index_file.parent
        splits.setdefault(folder.parent.name, {})[folder.name] = read_index(folder).summary
    PreparedManifest(
        sources=[],
        settings={"buckets": {"edges": [16, 32]}, "validation_fraction": 0.0, "seed": 0},
        columns=PREPARED,
        seen=0,
        kept=0,
        splits=splits,
    ).write(root)


def write_encoded(
    root: Path,
    sizes: dict[str, int],
    *,
    logvar: bool = True,
    num_captions: int = 1,
    latents: dict[str, tuple[int, int]] | None = None,
) -> Path:
    """Write ROOT/train/<bucket> of latents whose values are the sample's number, without a manifest.

    They are 4 x 4 x 4, or 4 x height x width where `latents` gives a bucket's height and width.
    """
    for name, num in sizes.items():
        size = (latents or {}).get(name, (4, 4))
        kinds = ["latent_mean", "latent_logvar"] if logvar else ["latent_mean"]
        columns = dict.fromkeys(kinds, f"ndarray:float16:4,{size[0]},{size[1]}") | TEXT
        samples = [encoded_sample(name, i, logvar=logvar, num_captions=num_captions, size=size) for i in range(num)]
        write_mds(root / "train" / name, columns, samples)
    return root / "train"


def encoded_manifest(folder: Path) -> EncodedManifest | None:
    """Read the manifest of encoded data above an MDS folder; None where there is none."""
    content = find_manifest(StreamLocation(name="a", remote=None, local=str(folder)))
    return None if content is None else EncodedManifest.from_json(content, str(folder))


def data_config(local: Path, *names: str, **options: Any) -> DataConfig:
    """A configuration that reads whole data sets of a few dozen samples."""
    defaults: dict[str, Any] = {
        "streams": [StreamConfig(name=name) for name in names],
        "representation": Representation.images,
        "resolution": 16,
        "global_batch_size": 8,
        "num_canonical_nodes": 4,
        "num_workers": 0,
        "download_attempts": 1,
        "download_timeout": 5.0,
        "loader_timeout": 300.0,
    }
    return DataConfig(local=str(local), **(defaults | options))
