"""Record what the code computes, and compare later code with it: batches, losses, data sets and generated images.

    python -m tests.tools.digests record FILE.json [--only PART ...] [--keep FOLDER] [--data FOLDER]
    python -m tests.tools.digests compare FILE.json [--only PART ...] [--kept FOLDER] [--data FOLDER]

`record` adds the digests of the parts to the file. With `--keep` it also stores what later code must be able to read:
prepared and encoded data, runs that ended at step 30 of 60, and states of the loader. `compare` computes everything
again and exits with 1 where something differs. With `--kept` it reads the stored files, continues the stored runs and
continues the loader from the stored states. `--data` names a folder with `emoji/folder_512`, for the part `emoji`.

Losses may differ by 1e-6, all else must be equal to the byte. Entries named `informational` are shown and never fail.
Record and compare on one machine with the same packages: another CPU rounds differently.
"""

import argparse
import hashlib
import io
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import composer  # noqa: F401  # Imported before the commands are forked, as are the others.
import diffusers
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from streaming import MDSWriter

from tests.tools.forking import end_as_program, free_port, run_as_main

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-6
NUM_BATCHES, RESUME_BATCH, BATCH_SIZE = 50, 20, 16
KEPT_STEP, LAST_STEP = 30, 60

# Adaptors: the only names of the package in this file. All else goes through commands, YAML and files.


def open_loader(yaml: Path, overrides: list[str]) -> Any:
    """Open the training data of this rank as run.py does."""
    from diffusion.config.loading import load_config
    from diffusion.train import build_train_data

    return build_train_data(load_config(str(yaml), overrides)).dataloader


def save_position(loader: Any, num_samples: int) -> dict[str, Any]:
    """Return the loader's state in a checkpoint, after `num_samples` of the current epoch over all ranks."""
    return loader.dataset.state_dict(num_samples, True)


def load_position(loader: Any, state: dict[str, Any]) -> None:
    """Continue from a state."""
    loader.dataset.load_state_dict(state)


def close_loader(loader: Any) -> None:
    """Release shared resources."""
    loader.dataset.close()


def initial_noise(seeds: list[int], shape: tuple[int, int, int]) -> torch.Tensor:
    """Return the noise of scripts/generate.py for these seeds: float32 [B, C, H, W]."""
    from diffusion.models.sampling import initial_latents

    return initial_latents(seeds, shape, torch.device("cpu"))


# Processes: forked from this one, so that libraries are imported once


def run_forked(num_ranks: int, log: Path, target: Callable[..., None], *arguments: Any) -> None:
    """Call a function in `num_ranks` processes, with a launcher's environment where there are several."""
    port = free_port()
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=_rank, args=(rank, num_ranks, port, log, target, arguments)) for rank in range(num_ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Idle workers of the process.
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"{log} ends with:\n{log.read_text()[-4000:]}")


def _rank(rank: int, num_ranks: int, port: int, log: Path, target: Callable[..., None], arguments: Any) -> None:
    os.setsid()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    if num_ranks > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        world |= {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()})
    end_as_program(lambda: target(*arguments))  # A normal exit waits for idle workers.


# Inputs: made from numbers, without the package


def draw_image(number: int, height: int, width: int, kind: str = "PNG") -> bytes:
    """Return the bytes of an image file of smooth noise."""
    noise = np.random.default_rng(number).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(buffer, kind)
    return buffer.getvalue()


def write_source(folder: Path) -> None:
    """Write 100 images to a folder, a tar and a parquet file; some are small, broken, repeated or have a keyword."""
    sizes = [(48, 40), (64, 64), (90, 70), (70, 100), (80, 80), (56, 72), (33, 60), (128, 96), (24, 30), (66, 64)]
    rows = []
    for i in range(100):
        kind = "jpeg" if i % 3 == 2 else "png"
        content = draw_image(i - 10 if i % 19 == 18 else i, *sizes[i % 10], kind.upper())
        caption = f"smooth noise number {i} of {kind}" + (", watermark" if i % 29 == 28 else "")
        rows.append((f"{i:03d}", kind, content[:100] if i % 41 == 40 else content, caption))
    (folder / "images").mkdir(parents=True)
    for name, kind, content, caption in rows[:50]:
        (folder / "images" / f"{name}.{kind}").write_bytes(content)
        (folder / "images" / f"{name}.txt").write_text(caption)
    with tarfile.open(folder / "some.tar", "w") as tar:
        for name, kind, content, caption in rows[50:75]:
            for suffix, member in ((kind, content), ("txt", caption.encode())):
                entry = tarfile.TarInfo(f"{name}.{suffix}")
                entry.size = len(member)
                tar.addfile(entry, io.BytesIO(member))
    table = pyarrow.table({"image": [row[2] for row in rows[75:]], "caption": [row[3] for row in rows[75:]]})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=10)


def write_streams(root: Path) -> None:
    """Write streams of many small shards with Streaming: images, latents of one size, and latents of three sizes."""
    image_columns = {"image": "bytes", "captions": "json", "width": "int32", "height": "int32", "key": "str"}
    for name, num, shape in (("a", 333, (4, 4)), ("b", 150, (4, 6)), ("c", 61, (6, 4))):
        captions = [[f"{i} {name} {k} of smooth noise" for k in range(1 + i % 3)] for i in range(num)]
        images = [b"not an image" if name == "c" and i in (7, 8) else draw_image(i, 24, 32) for i in range(num)]
        rows = [
            {"image": images[i], "captions": captions[i], "width": 32, "height": 24, "key": f"{name}/{i}"}
            for i in range(num)
        ]
        _write_mds(root / "images" / "train" / name, image_columns, rows)
        for kind, size in (("latents", (4, 4)), ("sizes", shape)):
            moments = f"ndarray:float16:4,{size[0]},{size[1]}"
            columns = {"latent_mean": moments, "latent_logvar": moments, "placement": "ndarray:int32:6", "key": "str"}
            columns |= {"token_ids": "ndarray:int32", "text_embeddings": "ndarray:float16"}
            columns |= {"pooled_text_embeddings": "ndarray:float16"}
            rows = [_latents(f"{name}/{i}", [ord(name), i], len(captions[i]), size) for i in range(num)]
            _write_mds(root / kind / "train" / name, columns, rows)
    for kind in ("images", "latents"):
        (root / kind / "withdrawn.json").write_text(json.dumps({"train/a": [0, 5, 6, 332], "train/c": [60]}))


def _latents(key: str, seed: list[int], num_captions: int, size: tuple[int, int]) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    embeddings = random.standard_normal((num_captions, 24, 8)).astype(np.float16)
    return {
        "latent_mean": random.standard_normal((4, *size)).astype(np.float16),
        "latent_logvar": random.standard_normal((4, *size)).astype(np.float16),
        "placement": random.integers(0, 99, 6, np.int32),
        "key": key,
        "token_ids": random.integers(0, 99, (num_captions, 24), np.int32),
        "text_embeddings": embeddings,
        "pooled_text_embeddings": embeddings[:, 0],
    }


def _write_mds(folder: Path, columns: dict[str, str], rows: list[dict[str, Any]]) -> None:
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=2**14) as writer:
        for row in rows:
            writer.write(row)


# Files of one call, and the commands that make them


@dataclass
class Files:
    """Paths by name: made in `work` on first use, or read from `kept`."""

    work: Path
    kept: Path | None
    data: Path | None

    def make(self, name: str) -> Path:
        """Return the path of what this code makes."""
        path = self.work / name
        if not path.exists():
            MAKERS[name](self, path)
        return path

    def input(self, name: str) -> Path:
        """Return the path of what a part starts from: kept, if there are kept files."""
        return self.make(name) if self.kept is None else self.kept / name

    def write(self, name: str, text: str) -> Path:
        """Write a text file into `work`."""
        path = self.work / name
        path.write_text(text)
        return path

    def command(self, script: str, *arguments: object) -> None:
        """Run a command of the repository, such as `scripts/export.py`; it must succeed."""
        run_forked(1, self.work / "log.txt", run_as_main, [str(ROOT / script), *map(str, arguments)])


ASPECTS = """
buckets: {sizes: [72x56, 64x64, 56x72], upscale: true}
validation_fraction: 0.2
shard_mb: 1
workers: 2
partition_size: 16
filters: {min_shorter_side: 32, min_caption_words: 3, keywords: [watermark], missing: keep}
duplicates: {exact: true, near: true, max_distance: 4}
"""


def make_prepared(files: Files, out: Path) -> None:
    """Prepare `edges` (buckets by the shorter side, options) and `aspects` (filters and aspect ratios, a YAML)."""
    sources = [files.input("source") / name for name in ("images", "some.tar", "table.parquet")]
    options = ["--edges", 32, 64, "--validation-fraction", 0.2, "--shard-mb", 1, "--partition-size", 16]
    files.command("scripts/prepare.py", *sources, out / "edges", *options, "--workers", 2, "--quiet", "--no-report")
    given = ["--config", files.write("aspects.yaml", ASPECTS), f"sources=[{', '.join(map(str, sources))}]"]
    files.command("scripts/prepare.py", *given, f"out={out}/aspects", "--quiet", "--no-report")


def make_encoded(files: Files, out: Path) -> None:
    """Encode `edges` (two resolutions, text embeddings) and `aspects` (sizes of the buckets, means only, bf16)."""
    prepared, model = files.input("prepared"), ["--architecture", "tiny", "--device", "cpu", "--workers", 1]
    options = ["--resolution", 32, 64, "--text-embeddings"]
    files.command("scripts/encode.py", prepared / "edges", out / "edges", *options, *model)
    options = ["--mean-only", "--precision", "bf16"]
    files.command("scripts/encode.py", prepared / "aspects", out / "aspects", *options, *model)


RECIPE = """
run_name: digests
seed: 17
model: {architecture: tiny}
objective: {prediction_type: v_prediction}
data: {resolution: 32, global_batch_size: 8, num_canonical_nodes: 4, num_workers: 0}
optimizer: {lr: 1.0e-3, max_grad_norm: 1.0}
schedule: {warmup: 10ba}
trainer: {max_duration: 60ba, precision: fp32, device: cpu, save_interval: 30ba, eval_interval: 30ba,
          progress_bar: false}
algorithms: {ema: {start: 15ba, decays: [0.9]}}
"""

RUNS: dict[str, Callable[[Files], list[str]]] = {
    "images-ddp": lambda files: [
        f"data.local={files.input('prepared')}/edges/train",
        "data.streams=[{name: 32-64, proportion: 1}, {name: 64-up, proportion: 2}]",
        "data.crop=random",
        "data.horizontal_flip=0.5",
        f"validation.local={files.input('prepared')}/edges/validation",
        "trainer.parallelism=ddp",
        "trainer.device_train_microbatch_size=4",
    ],
    "latents-fsdp": lambda files: [
        f"data.local={files.input('encoded')}/aspects/train",
        "data.representation=latents",
        "data.resolution=64",
        "data.streams=[{name: 72x56}, {name: 64x64, repeat: 1.5}, {name: 56x72}]",
        "data.mixing=groups",
        "data.group_size=4",
        "data.shuffle=block",
        f"validation.local={files.input('encoded')}/aspects/validation",
        "validation.streams=[{name: 64x64}]",
        "objective={posterior: mean, stratified_timesteps: true, min_snr_gamma: 5.0, offset_noise: 0.1}",
        "trainer.parallelism=fsdp",
    ],
}


def train(files: Files, name: str, folder: Path, last_step: int) -> Path:
    """Train a run up to a step, from the last checkpoint in its folder; return the folder."""
    options = [f"output_folder={folder}", f"trainer.max_duration={last_step}ba"]
    files.command("run.py", files.write("recipe.yaml", RECIPE), *RUNS[name](files), *options)
    return folder


def make_runs(files: Files, out: Path) -> None:
    """Train the runs that are continued later."""
    for name in RUNS:
        train(files, name, out / name, KEPT_STEP)


def make_positions(files: Files, path: Path) -> None:
    """Write the loader's state of each setting after `RESUME_BATCH` batches."""
    path.write_text(json.dumps(read_batches(files, 1)[1], indent=1))


MAKERS: dict[str, Callable[[Files, Path], None]] = {
    "source": lambda _, path: write_source(path),
    "streams": lambda _, path: write_streams(path),
    "prepared": make_prepared,
    "encoded": make_encoded,
    "runs": make_runs,
    "positions.json": make_positions,
}
"""What `--keep` stores."""

# Digests


def digest_of(content: bytes) -> str:
    """Return the SHA-256."""
    return hashlib.sha256(content).hexdigest()


UNSTABLE = {"manifest.json": {"path", "source"}, "scan.json": {"root"}}
"""Keys that hold paths or times of the input (or a hash of these), by file name. The rest of these files is hashed."""


def digest_folder(folder: Path) -> dict[str, str]:
    """Return the digest of each file by its path."""
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        if path.name in UNSTABLE:
            content = json.dumps(_without(json.loads(content), UNSTABLE[path.name])).encode()
        digests[path.relative_to(folder).as_posix()] = digest_of(content)
    return digests


def _without(value: Any, keys: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(one, keys) for key, one in value.items() if key not in keys}
    return [_without(one, keys) for one in value] if isinstance(value, list) else value


def part_prepare(files: Files) -> dict[str, Any]:
    """Digests of two prepared data sets."""
    return digest_folder(files.make("prepared"))


def part_encode(files: Files) -> dict[str, Any]:
    """Digests of two encoded data sets."""
    return digest_folder(files.make("encoded"))


def part_emoji(files: Files) -> dict[str, Any]:
    """Digests of 300 real images, prepared and encoded; nothing without `--data`."""
    if files.data is None:
        return {}
    source, out = files.work / "emoji", files.work / "emoji-sets"
    source.mkdir()
    for image in sorted(files.data.glob("emoji/folder_512/*.png"))[:300]:
        shutil.copy(image, source)
        shutil.copy(image.with_suffix(".txt"), source)
    options = ["--edges", 256, 512, "--validation-fraction", 0.1, "--shard-mb", 2, "--partition-size", 64]
    files.command("scripts/prepare.py", source, out / "prepared", *options, "--workers", 2, "--quiet", "--no-report")
    options = ["--resolution", 64, "--architecture", "tiny", "--device", "cpu", "--workers", 1]
    files.command("scripts/encode.py", out / "prepared", out / "encoded", *options)
    return digest_folder(out)


def batch_settings() -> dict[str, tuple[str, list[str]]]:
    """Return the data set and the overrides of each way of mixing and shuffling, by name."""
    mixings = {"mixed": [], "bucket": ["data.mixing=bucket"], "groups": ["data.mixing=groups", "data.group_size=4"]}
    block = ["data.shuffle=block", "data.shuffle_block_size=100"]
    shuffles = {"shard": [], "block": block, "none": ["data.shuffle=none"]}
    proportion = ["data.streams=[{name: a, proportion: 0.2}, {name: b, proportion: 0.5}, {name: c, proportion: 0.3}]"]
    repeat = ["data.streams=[{name: a, repeat: 0.4}, {name: b}, {name: c, repeat: 2.3}]"]
    sizes = ["data.streams=[{name: a}, {name: b, resolution: [16, 24]}, {name: c, resolution: [24, 16]}]"]
    one = ["data.streams=[{name: b}]"]
    settings = {}
    for mixing, how in mixings.items():
        settings |= {f"{mixing}-{shuffle}": ("images", how + what) for shuffle, what in shuffles.items()}
        settings |= {f"{mixing}-proportion": ("images", how + proportion), f"{mixing}-repeat": ("images", how + repeat)}
        settings[f"{mixing}-latents"] = ("latents", how)
        if mixing != "mixed":
            settings |= {f"{mixing}-sizes": ("images", how + sizes), f"{mixing}-sizes-latents": ("sizes", how + sizes)}
    settings |= {f"one-{shuffle}": ("images", one + what) for shuffle, what in shuffles.items()}
    settings |= {f"nodes-{num}": ("images", [f"data.num_canonical_nodes={num}"]) for num in (1, 16, 128)}
    settings |= {f"groups-of-{num}": ("latents", ["data.mixing=groups", f"data.group_size={num}"]) for num in (2, 8)}
    return settings | {
        "seed": ("images", ["seed=18"]),
        "crop": ("images", ["data.crop=random", "data.horizontal_flip=0.5"]),
        "means": ("latents", ["objective.posterior=mean"]),
        "text-embeddings": ("latents", ["data.text_embeddings=true"]),
        "workers": ("images", ["data.num_workers=2"]),
        "cache": ("images", ["data.predownload=32", "data.cache_limit=300kb"]),
    }


def part_batches(files: Files) -> dict[str, Any]:
    """Digests of 50 steps on one rank and on two, and of 30 steps continued from the state after step 20."""
    first, positions = read_batches(files, 1)
    files.write("positions.json", json.dumps(positions, indent=1))
    positions = json.loads(files.input("positions.json").read_text())
    digests = {"1 rank": first, "2 ranks": read_batches(files, 2)[0]}
    return digests | {f"{num} continued": read_batches(files, num, positions)[0] for num in (1, 2)}


def read_batches(files: Files, num_ranks: int, positions: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    """Read batches of each setting in `num_ranks` processes.

    Args:
        files: of this call.
        num_ranks: world size.
        positions: states to continue from, by setting; None starts at the first step.

    Returns:
        Digests by setting and rank; and states after `RESUME_BATCH` steps by setting.
    """
    out = Path(tempfile.mkdtemp(dir=files.work))
    arguments = (files.write("recipe.yaml", RECIPE), files.input("streams"), out, num_ranks, positions)
    run_forked(num_ranks, files.work / "log.txt", _read_settings, *arguments)
    digests, states = defaultdict(dict), {}
    for rank in range(num_ranks):
        for name, (digest, state) in json.loads((out / f"{rank}.json").read_text()).items():
            digests[name][f"rank {rank}"], states[name] = digest, state
    return digests, states


def _read_settings(yaml: Path, streams: Path, out: Path, num_ranks: int, positions: dict[str, Any] | None) -> None:
    if num_ranks > 1:
        torch.distributed.init_process_group("gloo")
    results = {}
    for name, (kind, overrides) in batch_settings().items():
        folder = f"{streams}/{kind}/train"
        paths = [f"data.remote={folder}", f"data.local={out}/cache"] if name == "cache" else [f"data.local={folder}"]
        common = [
            "data.resolution=16",
            f"data.global_batch_size={BATCH_SIZE}",
            "data.streams=[{name: a}, {name: b}, {name: c}]",
        ]
        common += [f"data.representation={'images' if kind == 'images' else 'latents'}"]
        loader = open_loader(yaml, [*paths, *common, *overrides])
        if positions is not None:
            load_position(loader, positions[name])
        results[name] = _digest_batches(loader, NUM_BATCHES if positions is None else NUM_BATCHES - RESUME_BATCH)
        close_loader(loader)
    (out / f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(results))


def _digest_batches(loader: Any, num_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Digests of each step's sample ids, of each step's tensors, and of each entry over all steps; and the state."""
    ids, tensors, entries, state = [], [], defaultdict(hashlib.sha256), {}
    for step_of_epoch, batch in islice(_steps(loader), num_steps):
        if len(ids) == RESUME_BATCH:
            state = save_position(loader, step_of_epoch * BATCH_SIZE)
        step = hashlib.sha256()
        for key, value in sorted((str(getattr(key, "value", key)), value) for key, value in batch.items()):
            for tensor in value if isinstance(value, list) else [value]:
                content = f"{key} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes()
                step.update(content)
                entries[key].update(content)
        ids.append(digest_of(batch["sample"].numpy().tobytes())[:16])
        tensors.append(step.hexdigest()[:16])
    return {"ids": ids, "tensors": tensors, "entries": {key: one.hexdigest() for key, one in entries.items()}}, state


def _steps(loader: Any) -> Iterator[tuple[int, Any]]:
    while True:
        yield from enumerate(loader)


def part_losses(files: Files) -> dict[str, Any]:
    """Losses of runs of 60 steps, and of steps 30 to 60 of runs that are continued from step 30."""
    digests = {}
    for name in RUNS:
        shutil.copytree(files.input("runs") / name, files.work / "continued" / name)
        digests[name] = {"informational": {}}
        for kind, first_step in (("whole", 0), ("continued", KEPT_STEP)):
            folder = train(files, name, files.work / kind / name, LAST_STEP)
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            digests[name][kind] = {
                f"step {row['step']:02d}": {key: value for key, value in row.items() if "loss" in key}
                for row in rows
                if row["step"] >= first_step
            }
            weights = folder.with_suffix(".safetensors")
            files.command("scripts/export.py", folder, weights)
            tensors = {key: digest_of(one.numpy().tobytes()) for key, one in load_file(weights).items()}
            digests[name]["informational"][f"weights, {kind}"] = digest_of(json.dumps(tensors, sort_keys=True).encode())
    return digests


def part_generate(files: Files) -> dict[str, Any]:
    """Digests of images of the kept runs, by scripts/generate.py, and by diffusers from an export."""
    digests, prompts = {}, ["smooth noise number 3", "a red circle"]
    for name in RUNS:
        run, out = files.input("runs") / name, files.work / "generated" / name
        options = ["--prompts", *prompts, "--seed", 5, "--steps", 8, "--height", 40, "--width", 48, "--device", "cpu"]
        files.command("scripts/generate.py", run, "--out", out / "ema", "--weights", "ema", *options)
        options = ["--prompts", *prompts, "--seed", 9, "--steps", 8, "--images-per-prompt", 2, "--device", "cpu"]
        options += ["--negative-prompt", "blue", "--guidance-scale", 1.5]
        files.command("scripts/generate.py", run, "--out", out / "raw", *options)
        files.command("scripts/export.py", run, out / "export", "--weights", "ema")
        pipeline: Any = DiffusionPipeline.from_pretrained(out / "export", local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        noise = initial_noise([5, 6], (4, 10, 12))
        images = pipeline(prompts, latents=noise, num_inference_steps=8, guidance_scale=3.0, height=40, width=48).images
        pixels = {f"export/{i}": np.asarray(image) for i, image in enumerate(images)}
        for path in sorted(out.glob("*/*.png")):
            with Image.open(path) as image:
                pixels[f"{path.parent.name}/{path.name}"] = np.asarray(image)
        digests[name] = {key: digest_of(f"{array.shape}".encode() + array.tobytes()) for key, array in pixels.items()}
    return digests


# Recording and comparing

PARTS: dict[str, Callable[[Files], dict[str, Any]]] = {
    "prepare": part_prepare,
    "encode": part_encode,
    "emoji": part_emoji,
    "batches": part_batches,
    "losses": part_losses,
    "generate": part_generate,
}


def differences(recorded: Any, found: Any, where: str) -> Iterator[str]:
    """Yield a line for each difference; numbers may differ by the tolerance."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            yield from differences(recorded.get(key), found.get(key), f"{where}/{key}")
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for i, (one, other) in enumerate(zip(recorded, found, strict=True)):
            yield from differences(one, other, f"{where}/{i}")
    elif isinstance(recorded, float) and isinstance(found, float):
        if not math.isclose(recorded, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{where}: recorded {recorded}, found {found}"
    elif recorded != found:
        yield f"{where}: recorded {str(recorded)[:70]}, found {str(found)[:70]}"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path, help="JSON file of the digests")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--keep", type=Path, help="record: folder for what later code must be able to read")
    parser.add_argument("--kept", type=Path, help="compare: that folder")
    parser.add_argument("--data", type=Path, help="folder with emoji/folder_512")
    options = parser.parse_args()
    if options.keep is not None and (there := [name for name in MAKERS if (options.keep / name).exists()]):
        parser.error(f"--keep {options.keep} holds {', '.join(there)} already: choose another folder")
    return options


def main() -> int:
    """Record or compare; return the exit code."""
    options = parse_arguments()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
    }
    os.environ["PYTHONPATH"] = str(ROOT)
    torch.set_num_threads(1)
    diffusers.utils.logging.disable_progress_bar()
    digests: dict[str, Any] = json.loads(options.file.read_text()) if options.file.exists() else {}
    num_failures = 0
    with tempfile.TemporaryDirectory() as work:
        files = Files(Path(work), options.kept and options.kept.resolve(), options.data and options.data.resolve())
        for part in options.only:
            start, cpu = time.monotonic(), sum(os.times()[:4])
            found = PARTS[part](files)
            sys.stdout.write(f"{part}: {time.monotonic() - start:.0f} s, {sum(os.times()[:4]) - cpu:.0f} s of CPU\n")
            if not found:
                sys.stdout.write("  skipped: it needs --data\n")
            elif options.action == "record":
                digests[part] = found
                options.file.parent.mkdir(parents=True, exist_ok=True)
                options.file.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
            else:
                lines = list(differences(digests.get(part), found, part))
                failures = [line for line in lines if "/informational/" not in line]
                num_failures += len(failures)
                sys.stdout.write("".join(f"  {line}\n" for line in lines[:20]) + f"  {len(failures)} differences\n")
            sys.stdout.flush()
        if options.keep is not None:
            for name in MAKERS:
                path = files.make(name)
                (shutil.copytree if path.is_dir() else shutil.copy)(path, options.keep / name)
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.exit(main())
