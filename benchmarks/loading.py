"""How fast the loader is, beside a stock loader, webdataset and bare decoding, as ratios of runs in turn."""

import importlib
import importlib.util
import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from streaming import MDSWriter, StreamingDataset
from torch.utils.data import DataLoader

from diffusion.config.data import DataConfig, ImageSize, Representation, StreamConfig
from diffusion.datasets.images import decode_rgb
from diffusion.datasets.loader import train_loader
from diffusion.datasets.transforms import ImageTransform

NUM_TOKENS = 77
LATENT = "ndarray:float16:4,32,32"
LATENT_COLUMNS = {"latent_mean": LATENT, "token_ids": f"ndarray:int32:1,{NUM_TOKENS}", "key": "str"}
IMAGE_COLUMNS = {"image": "bytes", "captions": "json", "key": "str"}


def measure_latent_loading(
    *, num_samples: int = 8192, batch_size: int = 256, num_workers: int = 0, rounds: int = 3, webdataset: bool = True
) -> dict[str, Any]:
    """Time one epoch of latents (4 x 32 x 32, means only) and token ids from a local disk, in turn with others.

    Args:
        num_samples: of the data set, of 8.3 kB each.
        batch_size: B.
        num_workers: loader processes; 0 loads in this process.
        rounds: times that each is measured; the best of each counts, which disturbances change least.
        webdataset: also the package of that name, where it is installed, with the arrays' bytes as entries.

    Returns:
        `ratio_to_stock` (rate over a `StreamingDataset` in a `DataLoader`), `ratio_to_webdataset` (None where it is
        not installed), the rates in samples per second (of CPU time, which others disturb little, where this process
        loads), and the settings.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        samples = list(_latents(num_samples))
        _write(root / "train" / "b", LATENT_COLUMNS, samples)
        ours = train_loader(
            _config(root / "train", batch_size, num_workers, Representation.latents),
            seed=0,
            tokenize=None,
            rank_batch_size=batch_size,
            with_logvar=False,
        )
        stock_data = StreamingDataset(local=str(root / "train" / "b"), shuffle=True, batch_size=batch_size)
        workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        loaders = {"ours": ours, "stock": DataLoader(stock_data, batch_size=batch_size, drop_last=True, **workers)}
        if webdataset and _has_webdataset():
            _write_tar(root / "data.tar", samples)
            loaders["webdataset"] = _webdataset_loader(root / "data.tar", batch_size, workers)
        runs = {name: lambda loader=loader: _count(loader) for name, loader in loaders.items()}
        rates = _rates(runs, rounds, time.perf_counter if num_workers else time.process_time)
    return {
        "ratio_to_stock": rates["ours"] / rates["stock"],
        "ratio_to_webdataset": rates["ours"] / rates["webdataset"] if "webdataset" in rates else None,
        "per_second": rates,
        "num_samples": num_samples,
        "batch_size": batch_size,
        "num_workers": num_workers,
    }


def measure_image_loading(
    *, num_samples: int = 256, side: int = 320, resolution: int = 256, batch_size: int = 32, rounds: int = 3
) -> dict[str, Any]:
    """Time one epoch of JPEG images, loaded in this process, in turn with bare decoding and resizing of the same.

    Bare: Pillow's JPEG decoder and the resampling of the transform on bytes that lie in memory, to an array. Captions
    are not tokenized: they become zeros.

    Args:
        num_samples: images of smooth noise.
        side: their side in pixels.
        resolution: side that they are resized to.
        batch_size: B.
        rounds: times that each is measured; the best of each counts.

    Returns:
        `ratio_to_bare`, the rates in images per second of CPU time, and the settings.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        samples = list(_images(num_samples, side))
        _write(root / "train" / "b", IMAGE_COLUMNS, samples)
        config = _config(root / "train", batch_size, 0, Representation.images)
        config.resolution = resolution
        loader = train_loader(config, seed=0, tokenize=_no_tokens, rank_batch_size=batch_size)
        num = len(loader) * batch_size
        transform = ImageTransform(size=ImageSize(resolution, resolution))

        def bare() -> int:
            for sample in samples[:num]:
                image = Image.open(io.BytesIO(sample["image"])).convert("RGB")
                np.asarray(image.resize((resolution, resolution), Image.Resampling.LANCZOS))
            return num

        def decode() -> int:
            for sample in samples[:num]:
                transform(decode_rgb(sample["image"]))
            return num

        runs = {"ours": lambda: _count(loader), "bare": bare, "decode": decode}
        rates = _rates(runs, rounds, time.process_time)
    return {
        "ratio_to_bare": rates["ours"] / rates["bare"],
        "per_second": rates,
        "num_samples": num_samples,
        "side": side,
        "resolution": resolution,
    }


def _rates(runs: dict[str, Callable[[], int]], rounds: int, now: Callable[[], float]) -> dict[str, float]:
    """Samples per second of each by a clock, the best of so many rounds after one that is not counted."""
    best = dict.fromkeys(runs, 0.0)
    for number in range(rounds + 1):
        for name, run in runs.items():
            began = now()
            rate = run() / (now() - began)
            best[name] = max(best[name], rate if number else 0.0)
    return best


def _count(loader: Any) -> int:
    return sum(len(batch["token_ids"]) for batch in loader)


def _config(root: Path, batch_size: int, num_workers: int, representation: Representation) -> DataConfig:
    return DataConfig(
        local=str(root),
        streams=[StreamConfig(name="b")],
        representation=representation,
        resolution=256,
        global_batch_size=batch_size,
        num_canonical_nodes=8,
        num_workers=num_workers,
    )


def _latents(num: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(0)
    for number in range(num):
        latent = generator.standard_normal((4, 32, 32), np.float32).astype(np.float16)
        token_ids = generator.integers(0, 49408, (1, NUM_TOKENS)).astype(np.int32)
        yield {"latent_mean": latent, "token_ids": token_ids, "key": f"source/{number:08}"}


def _images(num: int, side: int) -> Iterator[dict[str, Any]]:
    generator = np.random.default_rng(0)
    for number in range(num):
        noise = generator.integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=90)
        yield {"image": buffer.getvalue(), "captions": ["an image"], "key": f"source/{number:08}"}


def _no_tokens(captions: list[str]) -> Any:
    return np.zeros((len(captions), NUM_TOKENS), np.int32)


def _write(folder: Path, columns: dict[str, str], samples: list[dict[str, Any]]) -> None:
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=2**23) as writer:
        for sample in samples:
            writer.write(sample)


def _has_webdataset() -> bool:
    return importlib.util.find_spec("webdataset") is not None


def _write_tar(path: Path, samples: list[dict[str, Any]]) -> None:
    with tarfile.open(path, "w") as tar:
        for number, sample in enumerate(samples):
            for name in ("latent_mean", "token_ids"):
                data = sample[name].tobytes()
                entry = tarfile.TarInfo(f"{number:08}.{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def _webdataset_loader(path: Path, batch_size: int, workers: dict[str, Any]) -> Any:
    webdataset = importlib.import_module("webdataset")
    dataset = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False).shuffle(1000).map(_from_tar)
    return DataLoader(dataset.batched(batch_size, collation_fn=_stack, partial=False), batch_size=None, **workers)


def _from_tar(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "latent_mean": np.frombuffer(sample["latent_mean"], np.float16).reshape(4, 32, 32),
        "token_ids": np.frombuffer(sample["token_ids"], np.int32).astype(np.int64),
    }


def _stack(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {
        name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in ("latent_mean", "token_ids")
    }
