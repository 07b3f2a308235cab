"""Encode prepared pictures once: the VAE's posterior and the captions' token ids, in folders of the same layout."""

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from streaming import MDSWriter
from streaming.base.format import reader_from_json
from torch import nn
from torch.utils.data import Dataset
from tqdm import tqdm

from diffusion.datasets.buckets import bucket_range
from diffusion.datasets.encoded import EncodedManifest
from diffusion.datasets.images import UndecodableImageError, decode_rgb
from diffusion.datasets.loader import BatchLoader
from diffusion.datasets.manifest import MANIFEST, PreparedManifest, read_json, write_json_atomically
from diffusion.datasets.mds import INDEX, read_index, write_mds
from diffusion.datasets.streams import Tokenize
from diffusion.datasets.transforms import SquareTransform
from diffusion.errors import ConfigurationError, DataError

logger = logging.getLogger(__name__)

SETTINGS = "encoding.json"
"""The manifest of an encoding that has not ended yet."""

MAX_SHARD_BYTES = 2**30
"""A shard is begun where the prepared data begins one, and here."""


def encode(
    prepared: Path,
    out: Path,
    *,
    vae: nn.Module,
    vae_identity: str,
    tokenize: Tokenize,
    tokenizer_identity: str,
    empty_ids: list[int],
    resolution: int,
    batch_size: int = 32,
    device: str = "cpu",
    precision: str = "fp32",
    mean_only: bool = False,
    num_workers: int = 0,
) -> EncodedManifest:
    """Encode the buckets whose shorter side is at least the resolution.

    Buckets are published whole, and finished ones are not done again: the same call continues one that was stopped.
    Shards hold the samples that the prepared ones hold: the global order of training goes by shards, and so it is the
    same for pictures and latents.

    Args:
        prepared: output of `prepare`.
        out: folder to write.
        vae: diffusers' AutoencoderKL; is moved to the device.
        vae_identity: its `module_identity`.
        tokenize: K captions -> int32 [K, L].
        tokenizer_identity: identity of the tokenizer.
        empty_ids: ids [L] of the empty caption.
        resolution: side of the squares in pixels, a multiple of the VAE's factor.
        batch_size: pictures per forward pass; does not change the result beyond rounding.
        device: torch device of the VAE.
        precision: `fp32`, or `bf16` for autocast.
        mean_only: leave the log-variance out.
        num_workers: processes that decode; 0 decodes in this one.

    Returns:
        The manifest that was written.

    Raises:
        ConfigurationError: the resolution does not fit the VAE, or `out` is `prepared`.
        DataError: `prepared` is not prepared data or is damaged; `out` holds something else.
    """
    shape = _latent_shape(vae, resolution)
    buckets = _buckets(prepared, resolution)
    counts = {split: {path.name: read_index(path).num_samples for path in paths} for split, paths in buckets.items()}
    manifest = EncodedManifest(
        vae=vae_identity,
        tokenizer=tokenizer_identity,
        transform=SquareTransform(resolution=resolution).identity(),
        resolution=resolution,
        mean_only=mean_only,
        precision=precision,
        empty_ids=[int(i) for i in empty_ids],
        source=hashlib.sha256((prepared / MANIFEST).read_bytes()).hexdigest(),
        counts=counts,
    )
    if _is_finished(prepared, out, manifest):
        logger.info("%s is encoded already", out)
        return manifest
    encoder = _Encoder(vae=vae.to(device).eval(), device=torch.device(device), precision=precision, shape=shape)
    for split, folders in buckets.items():
        for folder in folders:
            target = out / split / folder.name
            if (target / INDEX).is_file():
                logger.info("%s was finished before", target)
                continue
            samples = PreparedBucket(folder, SquareTransform(resolution=resolution), tokenize)
            loader = BatchLoader(
                samples,
                batch_size=batch_size,
                collate_fn=_collate,
                num_workers=num_workers,
                pin_memory=encoder.device.type == "cuda",
            )
            progress = tqdm(total=len(samples), desc=f"{split}/{folder.name}", unit=" pictures", disable=None)
            with progress, write_mds(target, _columns(shape, mean_only), shard_bytes=MAX_SHARD_BYTES) as writer:
                for i, sample in enumerate(encoder.samples(loader, mean_only)):
                    if i in samples.shard_starts:
                        _begin_shard(writer)
                    writer.write(sample)
                    progress.update()
    write_json_atomically(out / MANIFEST, manifest.to_json())
    (out / SETTINGS).unlink(missing_ok=True)
    return manifest


class PreparedBucket(Dataset):
    """The pictures of a prepared bucket in their order, transformed, with the ids of all captions.

    Args:
        folder: one MDS folder.
        transform: a deterministic transform.
        tokenize: K captions -> int32 [K, L].
    """

    def __init__(self, folder: Path, transform: SquareTransform, tokenize: Tokenize) -> None:
        self._folder = folder
        self._transform = transform
        self._tokenize = tokenize
        shards = read_json(folder / INDEX)["shards"]
        if any(shard["compression"] for shard in shards):
            raise DataError(f"{folder} is compressed, which is not read here: prepare it without compression")
        self._readers = [reader_from_json(str(folder), None, shard) for shard in shards]
        self._ends = list(accumulate(shard["samples"] for shard in shards))
        self.shard_starts = frozenset(self._ends[:-1])

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Read one sample: `image` uint8 [3, R, R], `token_ids` int32 [K, L], `key`."""
        shard = bisect_right(self._ends, index)
        columns = self._readers[shard][index - (self._ends[shard - 1] if shard else 0)]
        try:
            picture = decode_rgb(columns["image"])
        except UndecodableImageError as error:
            raise DataError(
                f"{self._folder}, sample {index}, key '{columns['key']}' cannot be decoded ({error}), and could be "
                "when it was prepared: check the disk, and copy or prepare the data set again"
            ) from error
        return {
            "image": self._transform(picture),
            "token_ids": self._tokenize(columns["captions"]).astype(np.int32),
            "key": columns["key"],
        }


def _collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, list[NDArray[np.int32]], list[str]]:
    """Stack the pictures: uint8 [B, 3, R, R], and lists of ids and keys."""
    images = torch.from_numpy(np.stack([sample["image"] for sample in samples]))
    return images, [sample["token_ids"] for sample in samples], [sample["key"] for sample in samples]


@dataclass(frozen=True, kw_only=True)
class _Encoder:
    """The VAE's encoder on its device."""

    vae: Any
    device: torch.device
    precision: str
    shape: tuple[int, int, int]

    @torch.inference_mode()
    def posterior(self, images: torch.Tensor) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Encode uint8 [B, 3, R, R] to mean and log-variance: float16 [B, C, R/f, R/f] each."""
        pixels = images.to(self.device, non_blocking=True).float() / 127.5 - 1.0
        autocast = torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bf16" else nullcontext()
        with autocast:
            posterior = self.vae.encode(pixels).latent_dist
        return tuple(moment.half().cpu().numpy() for moment in (posterior.mean, posterior.logvar))  # pyright: ignore

    def samples(self, loader: BatchLoader, mean_only: bool) -> Iterator[dict[str, Any]]:
        """Encode batches into the columns of encoded data, sample by sample."""
        for images, token_ids, keys in loader:
            mean, logvar = self.posterior(images)
            for i, key in enumerate(keys):
                if not (np.isfinite(mean[i]).all() and np.isfinite(logvar[i]).all()):
                    raise DataError(f"the VAE gives no finite float16 latent for '{key}': check its weights")
                sample = {"latent_mean": mean[i], "token_ids": token_ids[i], "key": key}
                yield sample if mean_only else sample | {"latent_logvar": logvar[i]}


def _latent_shape(vae: Any, resolution: int) -> tuple[int, int, int]:
    """C, H, W of the latent of a square."""
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    if resolution <= 0 or resolution % factor:
        raise ConfigurationError(f"--resolution {resolution} is not a multiple of {factor}, the VAE's factor")
    return vae.config.latent_channels, resolution // factor, resolution // factor


def _begin_shard(writer: MDSWriter) -> None:
    """End the shard that is being written, as the writer does at its size limit."""
    writer.flush_shard()
    writer._reset_cache()


def _columns(shape: tuple[int, int, int], mean_only: bool) -> dict[str, str]:
    latent = f"ndarray:float16:{','.join(str(n) for n in shape)}"
    columns = {"latent_mean": latent, "latent_logvar": latent, "token_ids": "ndarray:int32", "key": "str"}
    return {name: kind for name, kind in columns.items() if not (mean_only and name == "latent_logvar")}


def _buckets(prepared: Path, resolution: int) -> dict[str, list[Path]]:
    """Buckets by split whose shorter side is at least the resolution, checked against the manifest."""
    splits = PreparedManifest.read(prepared).splits
    chosen = {
        split: [prepared / split / name for name in names if bucket_range(name)[0] >= resolution]
        for split, names in splits.items()
    }
    if not any(chosen.values()):
        names = sorted({name for names in splits.values() for name in names})
        raise DataError(
            f"{prepared} has no bucket of pictures whose shorter side is {resolution} or more (there are: "
            f"{', '.join(names) or 'none'}): lower --resolution, or prepare larger pictures"
        )
    for split, folders in chosen.items():
        for folder in folders:
            if read_index(folder).sha256 != splits[split][folder.name].sha256:
                raise DataError(f"{folder} is not what {prepared / MANIFEST} says: copy or prepare the data set again")
    return chosen


def _is_finished(prepared: Path, out: Path, manifest: EncodedManifest) -> bool:
    """Whether `out` is this encoding; otherwise make it ready to be written or continued."""
    if out.resolve() == prepared.resolve():
        raise ConfigurationError(f"{out} is the prepared data: choose another folder for the encoded data")
    for name in (MANIFEST, SETTINGS):
        if (out / name).is_file():
            there = read_json(out / name)
            here = manifest.to_json()
            differences = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
            if differences:
                raise DataError(
                    f"{out} holds another encoding ({', '.join(differences)} differ): choose another folder, or delete "
                    "this one"
                )
            return name == MANIFEST
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty and no encoding: choose another folder, or delete this one")
    out.mkdir(parents=True, exist_ok=True)
    write_json_atomically(out / SETTINGS, manifest.to_json())
    return False
