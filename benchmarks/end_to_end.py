"""Preparation of many small real images, from tars to checked shards.

python -m benchmarks.end_to_end 1000000 --images IMAGES --folder FOLDER
"""

import argparse
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from diffusion.formats.data_set import PreparedManifest

_PER_TAR = 10_000
_NUM_PROCESSES = 2


def measure(num_images: int, images: Path, folder: Path) -> dict[str, Any]:
    """Write tars of crops of real images, prepare them stage by stage, and compare each sample with its source.

    Args:
        num_images: images to prepare; a multiple of 10,000.
        images: folder of images, each with a .txt beside it.
        folder: for the tars, which are kept and used again, and the prepared data.

    Returns:
        For each stage seconds, CPU seconds, and peak memory of its largest process (MiB); bytes; images by reason.
    """
    tars, out = folder / "tars", folder / "prepared"
    tars.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    numbers = [n for n in range(num_images // _PER_TAR) if not (tars / f"{n:05}.tar").exists()]
    with ProcessPoolExecutor(_NUM_PROCESSES) as pool:
        list(pool.map(functools.partial(_write_tar, images, tars), numbers))
    stages = {}
    settings = {
        "sources": [str(tars)],
        "out": str(out),
        "buckets": {"edges": [64, 96, 128]},
        "validation_fraction": 0.01,
        "duplicates": {"near": False},  # Half of them: crops of the same image.
        "shard_mb": 64,
        "window_mb": 128,
        "workers": _NUM_PROCESSES,
    }
    config = folder / "prepare.yaml"
    config.write_text(json.dumps(settings))
    for stage in ("scan", "select", "write"):
        stages[stage] = _run([sys.executable, "scripts/prepare.py", stage, "--config", str(config)])
    manifest = PreparedManifest.read(str(out))
    scanned = [file.stat().st_size for file in (out / "metadata").iterdir()]
    shards = [file.stat().st_size for file in out.rglob("*.mds")]
    return {
        "images": num_images,
        "stages": stages,
        "bytes": {
            "tars": sum(file.stat().st_size for file in tars.iterdir()),
            "metadata": sum(scanned),
            "shards": sum(shards),
        },
        "shards": len(shards),
        "kept and equal to the byte": _check(out),
        "rejected": {reason: entry.count for reason, entry in manifest.rejected.items()},
    }


def _write_tar(images: Path, tars: Path, number: int) -> None:
    """Write 10,000 crops of 72 to 160 px as JPEG with their captions."""
    random = np.random.default_rng([7, number])
    sources = sorted(images.glob("*.png"))
    opened = functools.cache(lambda path: Image.open(path).convert("RGB"))
    partial = tars / f"{number:05}.partial"
    with tarfile.open(partial, "w") as tar:
        for i in range(_PER_TAR):
            source = sources[random.integers(len(sources))]
            image, side = opened(source), int(random.integers(72, 161))
            crop = int(random.integers(128, min(image.size) + 1))
            left, top = (int(random.integers(length - crop + 1)) for length in image.size)
            small = image.resize((side, side), Image.Resampling.BOX, (left, top, left + crop, top + crop))
            content = io.BytesIO()
            small.save(content, "JPEG", quality=int(random.integers(70, 96)))
            for suffix, data in (("jpg", content.getvalue()), ("txt", source.with_suffix(".txt").read_bytes())):
                member = tarfile.TarInfo(f"{number:05}{i:04}.{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    partial.rename(tars / f"{number:05}.tar")


def _run(command: list[str]) -> dict[str, float]:
    start = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} ended with status {status}")
    return {
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mib": round(usage.ru_maxrss / 2**10),
    }


def _check(out: Path) -> int:
    """Compare the digest of each sample's image with that of the scan; return the number of samples."""
    import pyarrow.parquet as pq
    from streaming.base.format import reader_from_json  # Imported late: `_run` counts the memory of this process, too.

    digests: dict[str, str] = {}
    for file in sorted((out / "metadata").iterdir()):
        table = pq.read_table(file, columns=["key", "xxh128"])
        digests.update(zip(table["key"].to_pylist(), table["xxh128"].to_pylist(), strict=True))
    num = 0
    for index in sorted(out.glob("*/*/index.json")):
        for entry in json.loads(index.read_text())["shards"]:
            for sample in reader_from_json(str(index.parent), None, entry):
                if digests.pop(sample["key"]) != xxhash.xxh3_128_hexdigest(sample["image"]):
                    raise SystemExit(f"{sample['key']} is not what was scanned")
                num += 1
    return num


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("num_images", type=int)
    parser.add_argument("--images", type=Path, required=True, help="folder of PNG images with .txt captions")
    parser.add_argument("--folder", type=Path, required=True, help="for tars and result")
    options = parser.parse_args()
    print(json.dumps(measure(options.num_images, options.images, options.folder), indent=2))
