"""Record what the code computes, and compare later code with it: batches, losses, data sets and images.

    python tests/tools/digests.py record FILE.json [--only PART ...] [--keep FOLDER] [--data FOLDER]
    python tests/tools/digests.py compare FILE.json [--only PART ...] [--kept FOLDER] [--data FOLDER]

`record` writes the digests of the parts, and with `--keep` the files that later code has to read as well: runs with a
checkpoint at step 30 of 60, a prepared and an encoded data set, and states of the loader. `compare` computes the same
again and exits with 1 at a difference. With `--kept` it reads those files: it continues the runs and the loaders.
`--data` names a folder with `emoji/folder_512`, for the part `emoji`.

Losses may differ by 1e-6, everything else is equal to the byte. Record and compare on one machine with the same pinned
packages: another CPU rounds differently. Entries named `informational` are shown and never fail.
"""

import argparse
import hashlib
import io
import json
import math
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tarfile
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import composer  # noqa: F401  (imported once here, and not by each command)
import diffusers
import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from PIL import Image
from streaming import MDSWriter

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-6
NUM_STEPS, RESUME_STEP, KEPT_STEP, LAST_STEP = 50, 20, 30, 60

# Adaptors: all that this file calls by its name in the package. The rest are commands, configurations and files.


def open_loader(config: Path, overrides: list[str]) -> Any:
    """The training data of this rank, as run.py builds it."""
    from diffusion.config.loading import load_config
    from diffusion.train_data import build_train_data

    return build_train_data(load_config(str(config), overrides)).dataloader


def save_position(loader: Any, num_samples: int) -> dict[str, Any]:
    """The state that a checkpoint holds of the data after so many samples of the epoch, over all ranks."""
    return loader.dataset.state_dict(num_samples, True)


def load_position(loader: Any, state: dict[str, Any]) -> None:
    """Continue at a state."""
    loader.dataset.load_state_dict(state)


def close_loader(loader: Any) -> None:
    """Free what the loader holds."""
    loader.dataset.close()


def initial_noise(seeds: list[int], shape: tuple[int, int, int]) -> torch.Tensor:
    """The noise from which scripts/generate.py draws the images of these seeds: float32 [B, C, H, W]."""
    from diffusion.models.sampling import initial_latents

    return initial_latents(seeds, shape, torch.device("cpu"))


# Processes: forked from this one, which has imported the libraries.


def run_forked(num_ranks: int, log: Path, target: Callable[..., None], *arguments: Any) -> None:
    """Call a function in `num_ranks` processes at once, each with a launcher's environment if there are several."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_be_rank, args=(rank, num_ranks, port, log, target, *arguments))
        for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # Workers that the process has left.
    if any(process.exitcode for process in ranks):
        raise SystemExit(f"{log} ends with:\n{log.read_text()[-4000:]}")


def _be_rank(rank: int, num_ranks: int, port: int, log: Path, target: Callable[..., None], *arguments: Any) -> None:
    os.setsid()
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(ROOT)
    if num_ranks > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        world |= {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in world.items()})
    code: Any = 0
    try:
        target(*arguments)
    except SystemExit as error:
        code = error.code
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))  # Workers that are idle are not waited for.


def command(log: Path, script: str, *arguments: object) -> None:
    """Run a command of the repository, such as `scripts/export.py`; it must succeed."""
    run_forked(1, log, _run_script, [str(ROOT / script), *map(str, arguments)])


def _run_script(arguments: list[str]) -> None:
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


# Inputs: made from numbers alone, by no code of the package.

RECIPE = """
run_name: digests
seed: 17
model: {architecture: tiny}
objective: {prediction_type: v_prediction}
data: {resolution: 32, global_batch_size: 8, num_canonical_nodes: 4, num_workers: 0}
optimizer: {lr: 1.0e-3, max_grad_norm: 1.0}
schedule: {warmup: 10ba}
trainer: {max_duration: 60ba, precision: fp32, device: cpu, save_interval: 30ba, eval_interval: 20ba,
          progress_bar: false}
algorithms: {ema: {start: 15ba, decays: [0.9]}}
"""

ASPECTS = """
buckets: {sizes: [72x56, 64x64, 56x72], upscale: true}
validation_fraction: 0.2
shard_mb: 1
workers: 2
partition_size: 16
filters: {min_shorter_side: 32, min_caption_words: 3, keywords: [watermark], missing: keep}
duplicates: {exact: true, near: true, max_distance: 4}
"""


def picture(number: int, height: int, width: int) -> Image.Image:
    """Smooth noise."""
    noise = np.random.default_rng(number).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str) -> bytes:
    """Bytes of a picture file."""
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def write_source(folder: Path) -> None:
    """100 pictures in a folder, a tar and a parquet file: some small, broken, repeated or without a good caption."""
    sizes = [(48, 40), (64, 64), (90, 70), (70, 100), (80, 80), (56, 72), (33, 60), (128, 96), (24, 30), (66, 64)]
    rows = []
    for number in range(100):
        kind = "JPEG" if number % 3 == 2 else "PNG"
        data = encoded(picture(number - number % 37 // 36, *sizes[number % 10]), kind)
        caption = f"smooth noise number {number} of {kind}" + (", watermark" if number % 29 == 28 else "")
        rows.append((f"{number:03d}", kind.lower(), data if number % 41 != 40 else data[:100], caption))
    (folder / "pictures").mkdir(parents=True)
    for name, kind, data, caption in rows[:50]:
        (folder / "pictures" / f"{name}.{kind}").write_bytes(data)
        (folder / "pictures" / f"{name}.txt").write_text(caption)
    with tarfile.open(folder / "some.tar", "w") as tar:
        for name, kind, data, caption in rows[50:75]:
            for suffix, content in ((kind, data), ("txt", caption.encode())):
                entry = tarfile.TarInfo(f"{name}.{suffix}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    columns = {"image": [row[2] for row in rows[75:]], "caption": [row[3] for row in rows[75:]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "table.parquet", row_group_size=10)


STREAMS = {"a": 333, "b": 150, "c": 61}
SHAPES = {"a": (4, 4), "b": (4, 6), "c": (6, 4)}
PREPARED = {"image": "bytes", "captions": "json", "width": "int32", "height": "int32", "key": "str", "metadata": "json"}


def write_streams(root: Path) -> None:
    """Data sets in many small shards, written by Streaming: pictures, latents of one size, and latents of several."""
    for name, num in STREAMS.items():
        texts = [[f"{i} {name} {k} of smooth noise" for k in range(1 + i % 3)] for i in range(num)]
        rows = []
        for i in range(num):
            image = picture(i, 24, 32)
            data = b"no picture" if name == "c" and i in (7, 8) else encoded(image, "PNG")
            row = {"image": data, "captions": texts[i], "width": image.width, "height": image.height}
            rows.append({**row, "key": f"{name}/{i}", "metadata": {}})
        _write_mds(root / "images" / "train" / name, PREPARED, rows, 2**14)
        for kind, shape in (("latents", (4, 4)), ("sizes", SHAPES[name])):
            rows = [_latents(i, name, texts[i], shape) for i in range(num)]
            moments = f"ndarray:float16:4,{shape[0]},{shape[1]}"
            columns = {"latent_mean": moments, "latent_logvar": moments, "token_ids": "ndarray:int32", "key": "str"}
            columns |= {"text_embeddings": "ndarray:float16", "pooled_text_embeddings": "ndarray:float16"}
            _write_mds(root / kind / "train" / name, columns | {"placement": "ndarray:int32:6"}, rows, 2**13)
    marks = {"train/a": [0, 5, 6, 332], "train/c": [60]}
    for kind in ("images", "latents"):
        (root / kind / "withdrawn.json").write_text(json.dumps(marks))


def _latents(number: int, name: str, captions: list[str], shape: tuple[int, int]) -> dict[str, Any]:
    random = np.random.default_rng([number, ord(name)])
    mean, logvar = random.standard_normal((2, 4, *shape)).astype(np.float16)
    ids = random.integers(0, 99, (len(captions), 24), np.int32)
    embeddings = random.standard_normal((len(captions), 24, 8)).astype(np.float16)
    pooled, placement = embeddings.mean(1), random.integers(0, 99, 6, np.int32)
    return {"latent_mean": mean, "latent_logvar": logvar, "token_ids": ids, "key": f"{name}/{number}",
            "text_embeddings": embeddings, "pooled_text_embeddings": pooled, "placement": placement}  # fmt: skip


def _write_mds(folder: Path, columns: dict[str, str], rows: list[dict[str, Any]], shard_bytes: int) -> None:
    with MDSWriter(out=str(folder), columns=columns, hashes=["xxh64"], size_limit=shard_bytes) as writer:
        for row in rows:
            writer.write(row)


# What is made once in a call, from the inputs, by the commands


@dataclass
class Workplace:
    """Files of one call: made in `work` when they are asked for, or read from `kept`."""

    work: Path
    kept: Path | None
    data: Path | None

    def make(self, name: str) -> Path:
        """Path of what this code makes."""
        path = self.work / name
        if not path.exists():
            MAKERS[name](self, path)
        return path

    def input(self, name: str) -> Path:
        """Path of what other parts begin with: kept, if there is a folder of kept files."""
        return self.make(name) if self.kept is None else self.kept / name

    def command(self, script: str, *arguments: object) -> None:
        """Run a command of the repository."""
        command(self.work / "log.txt", script, *arguments)

    def write(self, name: str, text: str) -> Path:
        """Write a text file that a command reads."""
        path = self.work / name
        path.write_text(text)
        return path


def make_prepared(place: Workplace, out: Path) -> None:
    """`edges`: buckets by the shorter side, from options. `aspects`: filtered, by aspect ratio, from a YAML."""
    source = place.input("source")
    sources = [source / "pictures", source / "some.tar", source / "table.parquet"]
    options = ["--edges", 32, 64, "--validation-fraction", 0.2, "--shard-mb", 1, "--partition-size", 16]
    place.command("scripts/prepare.py", *sources, out / "edges", *options, "--workers", 2, "--quiet", "--no-report")
    listed = f"sources=[{', '.join(map(str, sources))}]"
    yaml = place.write("aspects.yaml", ASPECTS)
    place.command("scripts/prepare.py", "--config", yaml, listed, f"out={out}/aspects", "--quiet", "--no-report")


def make_encoded(place: Workplace, out: Path) -> None:
    """`edges` at two resolutions with text embeddings, `aspects` at the sizes of the buckets, means only, in bf16."""
    prepared, model = place.input("prepared"), ["--architecture", "tiny", "--device", "cpu", "--workers", 1]
    options = ["--resolution", 32, 64, "--text-embeddings"]
    place.command("scripts/encode.py", prepared / "edges", out / "edges", *options, *model)
    options = ["--mean-only", "--precision", "bf16"]
    place.command("scripts/encode.py", prepared / "aspects", out / "aspects", *options, *model)


def make_runs(place: Workplace, out: Path) -> None:
    """The runs that are continued: 30 steps."""
    for name in RUNS:
        train(place, name, out / name, KEPT_STEP)


RUNS = {
    "images-ddp": lambda place: [
        f"data.local={place.input('prepared')}/edges/train",
        "data.streams=[{name: 32-64, proportion: 1}, {name: 64-up, proportion: 2}]",
        "data.crop=random",
        "data.horizontal_flip=0.5",
        f"validation.local={place.input('prepared')}/edges/validation",
        "trainer.parallelism=ddp",
        "trainer.device_train_microbatch_size=4",
    ],
    "latents-fsdp": lambda place: [
        f"data.local={place.input('encoded')}/aspects/train",
        "data.representation=latents",
        "data.resolution=64",
        "data.streams=[{name: 72x56}, {name: 64x64, repeat: 1.5}, {name: 56x72}]",
        "data.mixing=groups",
        "data.group_size=4",
        "data.shuffle=block",
        f"validation.local={place.input('encoded')}/aspects/validation",
        "validation.streams=[{name: 64x64}]",
        "objective={posterior: mean, stratified_timesteps: true, min_snr_gamma: 5.0, offset_noise: 0.1}",
        "trainer.parallelism=fsdp",
    ],
}


def train(place: Workplace, name: str, folder: Path, last_step: int) -> None:
    """Train a run up to a step, from where its folder ends."""
    yaml = place.write("recipe.yaml", RECIPE)
    options = [f"output_folder={folder}", f"trainer.max_duration={last_step}ba"]
    place.command("run.py", yaml, *RUNS[name](place), *options)


MAKERS: dict[str, Callable[[Workplace, Path], None]] = {
    "source": lambda place, path: write_source(path),
    "streams": lambda place, path: write_streams(path),
    "prepared": make_prepared,
    "encoded": make_encoded,
    "runs": make_runs,
    "positions.json": lambda place, path: path.write_text(json.dumps(read_batches(place, 1, None)[1], indent=1)),
}
"""What is kept, in the order in which it is made."""

# Part: batches


def batch_settings() -> dict[str, tuple[str, list[str]]]:
    """Data set and overrides of each way to mix and to shuffle, by name."""
    mixings = {"mixed": [], "bucket": ["data.mixing=bucket"], "groups": ["data.mixing=groups", "data.group_size=4"]}
    shuffles = {
        "shard": [],
        "block": ["data.shuffle=block", "data.shuffle_block_size=100"],
        "none": ["data.shuffle=none"],
    }
    proportion = ["data.streams=[{name: a, proportion: 0.2}, {name: b, proportion: 0.5}, {name: c, proportion: 0.3}]"]
    repeat = ["data.streams=[{name: a, repeat: 0.4}, {name: b}, {name: c, repeat: 2.3}]"]
    sizes = ["data.streams=[{name: a}, {name: b, resolution: [16, 24]}, {name: c, resolution: [24, 16]}]"]
    settings = {}
    for mixing, how in mixings.items():
        settings |= {f"{mixing}-{shuffle}": ("images", how + what) for shuffle, what in shuffles.items()}
        settings |= {f"{mixing}-proportion": ("images", how + proportion), f"{mixing}-repeat": ("images", how + repeat)}
        settings[f"{mixing}-latents"] = ("latents", how)
        if mixing != "mixed":
            settings[f"{mixing}-sizes"] = ("images", how + sizes)
            settings[f"{mixing}-sizes-latents"] = ("sizes", how + sizes)
    one = ["data.streams=[{name: b}]"]
    settings |= {f"one-{shuffle}": ("images", one + what) for shuffle, what in shuffles.items()}
    settings |= {f"nodes-{num}": ("images", [f"data.num_canonical_nodes={num}"]) for num in (1, 16, 128)}
    settings |= {f"group-of-{num}": ("latents", [mixings["groups"][0], f"data.group_size={num}"]) for num in (2, 8)}
    return settings | {
        "seed": ("images", ["seed=18"]),
        "crop": ("images", ["data.crop=random", "data.horizontal_flip=0.5"]),
        "means": ("latents", ["objective.posterior=mean"]),
        "text-embeddings": ("latents", ["data.text_embeddings=true"]),
        "workers": ("images", ["data.num_workers=2"]),
        "cache": ("images", ["data.remote=REMOTE", "data.predownload=32", "data.cache_limit=300kb"]),
    }


def read_batches(place: Workplace, num_ranks: int, positions: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
    """Read the first steps of each setting on so many ranks.

    Args:
        place: where the data is.
        num_ranks: world size.
        positions: states to continue from; None starts at the first step.

    Returns:
        Digests by setting and rank, and the state after `RESUME_STEP` steps of each setting.
    """
    out = Path(tempfile.mkdtemp(dir=place.work))
    yaml = place.write("recipe.yaml", RECIPE)
    streams = place.input("streams")
    run_forked(num_ranks, place.work / "log.txt", _read_settings, yaml, streams, out, num_ranks, positions)
    digests, states = defaultdict(dict), {}
    for rank in range(num_ranks):
        for name, (digest, state) in json.loads((out / f"{rank}.json").read_text()).items():
            digests[name][f"rank {rank} of {num_ranks}"] = digest
            states[name] = state
    return digests, states


def _read_settings(yaml: Path, streams: Path, out: Path, num_ranks: int, positions: dict[str, Any] | None) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", 0))
    if num_ranks > 1:
        torch.distributed.init_process_group("gloo")
    results = {}
    for name, (kind, overrides) in batch_settings().items():
        representation = "images" if kind == "images" else "latents"
        common = [f"data.local={streams}/{kind}/train", "data.resolution=16", "data.global_batch_size=16"]
        common += [f"data.representation={representation}", "data.streams=[{name: a}, {name: b}, {name: c}]"]
        overrides = [override.replace("REMOTE", f"{streams}/{kind}/train") for override in overrides]
        if name == "cache":
            common[0] = f"data.local={out}/cache"
        loader = open_loader(yaml, common + overrides)
        if positions is not None:
            load_position(loader, positions[name])
        results[name] = _digest_batches(loader, NUM_STEPS if positions is None else NUM_STEPS - RESUME_STEP)
        close_loader(loader)
    (out / f"{rank}.json").write_text(json.dumps(results))


def _digest_batches(loader: Any, num_steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Digests of the samples' ids of each step, of all tensors of each step, and of each entry over all steps."""
    ids, tensors, entries, state = [], [], defaultdict(hashlib.sha256), {}
    for inside, batch in islice(_steps(loader), num_steps):
        if len(ids) == RESUME_STEP:
            state = save_position(loader, inside * 16)
        step = hashlib.sha256()
        for key, value in sorted((str(getattr(key, "value", key)), value) for key, value in batch.items()):
            for tensor in value if isinstance(value, list) else [value]:
                content = f"{key} {tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes()
                step.update(content)
                entries[key].update(content)
        ids.append(digest_of(batch["sample"].numpy().tobytes())[:16])
        tensors.append(step.hexdigest()[:16])
    whole = {key: entry.hexdigest() for key, entry in sorted(entries.items())}
    return {"ids": ids, "tensors": tensors, "entries": whole}, state


def _steps(loader: Any) -> Iterator[tuple[int, Any]]:
    """Steps done in the epoch before each batch, and the batch, over epochs."""
    while True:
        yield from enumerate(loader)


def part_batches(place: Workplace) -> dict[str, Any]:
    """The first 50 steps on one and two ranks, and 30 steps from the state after step 20."""
    first, states = read_batches(place, 1, None)
    place.write("positions.json", json.dumps(states, indent=1))
    positions = json.loads(place.input("positions.json").read_text())
    digests = {"from the start": first, "from the start on two": read_batches(place, 2, None)[0]}
    return digests | {f"continued on {num}": read_batches(place, num, positions)[0] for num in (1, 2)}


# Part: losses


def part_losses(place: Workplace) -> dict[str, Any]:
    """Losses of runs of 60 steps, and of the last 30 of runs that are continued from a checkpoint at step 30."""
    digests = {}
    for name in RUNS:
        whole, continued = place.work / "whole" / name, place.work / "continued" / name
        train(place, name, whole, LAST_STEP)
        shutil.copytree(place.input("runs") / name, continued)
        train(place, name, continued, LAST_STEP)
        weights = place.work / f"{name}.safetensors"
        place.command("scripts/export.py", whole, weights)
        digests[name] = {
            "whole": read_losses(whole),
            "continued": {key: values for key, values in read_losses(continued).items() if int(key) >= KEPT_STEP},
            "informational": {"final weights": digest_of(weights.read_bytes())},
        }
    return digests


def read_losses(folder: Path) -> dict[str, dict[str, float]]:
    """Losses in training and in validation of each step of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {f"{row['step']:02d}": {key: value for key, value in row.items() if "loss" in key} for row in rows}


# Parts: prepare, encode, emoji


def part_prepare(place: Workplace) -> dict[str, Any]:
    """The files of two prepared data sets."""
    return digest_folder(place.make("prepared"))


def part_encode(place: Workplace) -> dict[str, Any]:
    """The files of two encoded data sets."""
    return digest_folder(place.make("encoded"))


def part_emoji(place: Workplace) -> dict[str, Any]:
    """The files of 300 real pictures, prepared and encoded; nothing without `--data`."""
    if place.data is None:
        return {}
    source, out = place.work / "emoji", place.work / "emoji-sets"
    source.mkdir()
    for picture_file in sorted(place.data.glob("emoji/folder_512/*.png"))[:300]:
        for path in (picture_file, picture_file.with_suffix(".txt")):
            shutil.copy(path, source)
    options = ["--edges", 256, 512, "--validation-fraction", 0.1, "--shard-mb", 2, "--partition-size", 64]
    place.command("scripts/prepare.py", source, out / "prepared", *options, "--workers", 2, "--quiet", "--no-report")
    options = ["--resolution", 64, "--architecture", "tiny", "--device", "cpu", "--workers", 1]
    place.command("scripts/encode.py", out / "prepared", out / "encoded", *options)
    return digest_folder(out)


UNSTABLE: dict[str, tuple[str, ...]] = {}
"""Keys of JSON files that hold times or paths, by the name of the file: what is hashed is the rest."""


def digest_folder(folder: Path) -> dict[str, str]:
    """SHA-256 of each file, by its path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): digest_of(_stable_bytes(path)) for path in paths}


def _stable_bytes(path: Path) -> bytes:
    return path.read_bytes()


def digest_of(content: bytes) -> str:
    """SHA-256 in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


# Part: generate


def part_generate(place: Workplace) -> dict[str, Any]:
    """Pixels of images from the weights and their average, by scripts/generate.py and by diffusers from an export."""
    digests = {}
    prompts = ["smooth noise number 3", "a red circle"]
    for name in RUNS:
        run, out = place.input("runs") / name, place.work / "generated" / name
        options = ["--prompts", *prompts, "--images-per-prompt", 2, "--seed", 5, "--steps", 8, "--device", "cpu"]
        place.command("scripts/generate.py", run, "--out", out / "raw", *options)
        options += ["--negative-prompt", "blue", "--guidance-scale", 1.5, "--height", 40, "--width", 48]
        place.command("scripts/generate.py", run, "--out", out / "ema", "--weights", "ema", *options)
        place.command("scripts/export.py", run, out / "export", "--weights", "ema")
        pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(out / "export", local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        noise = initial_noise([5, 6], (4, 10, 12))
        images = pipeline(prompts, latents=noise, height=40, width=48, num_inference_steps=8).images
        pixels = {f"export/{i}": digest_of(np.asarray(image).tobytes()) for i, image in enumerate(images)}
        for path in sorted(out.glob("*/*.png")):
            with Image.open(path) as image:
                pixels[f"{path.parent.name}/{path.name}"] = digest_of(np.asarray(image).tobytes())
        digests[name] = pixels
    return digests


# Recording and comparing

PARTS: dict[str, Callable[[Workplace], dict[str, Any]]] = {
    "batches": part_batches,
    "losses": part_losses,
    "prepare": part_prepare,
    "encode": part_encode,
    "generate": part_generate,
    "emoji": part_emoji,
}


def differences(recorded: Any, found: Any, where: str) -> Iterator[str]:
    """What is not the same, one line each; numbers may differ by the tolerance."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            if key != "informational":
                yield from differences(recorded.get(key), found.get(key), f"{where}/{key}")
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for i, (one, other) in enumerate(zip(recorded, found, strict=True)):
            yield from differences(one, other, f"{where}/{i}")
    elif isinstance(recorded, float) and isinstance(found, float):
        if not math.isclose(recorded, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            yield f"{where}: {recorded} was recorded, {found} found"
    elif recorded != found:
        yield f"{where}: {str(recorded)[:70]} was recorded, {str(found)[:70]} found"


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Record or compare; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("file", type=Path, help="JSON file of the digests")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--keep", type=Path, help="record: new folder for what later code has to read")
    parser.add_argument("--kept", type=Path, help="compare: that folder")
    parser.add_argument("--data", type=Path, help="folder with emoji/folder_512")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    sys.path.insert(0, str(ROOT))
    torch.set_num_threads(1)
    digests: dict[str, Any] = json.loads(options.file.read_text()) if options.file.exists() else {}
    num_different = 0
    with tempfile.TemporaryDirectory() as work:
        place = Workplace(Path(work), options.kept and options.kept.resolve(), options.data and options.data.resolve())
        for part in options.only:
            start = time.monotonic()
            found = PARTS[part](place)
            say(f"{part}: {time.monotonic() - start:.0f} s")
            if options.what == "record":
                digests[part] = found
                options.file.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
            elif part != "emoji" or found:
                lines = list(differences(digests.get(part), found, part))
                num_different += len(lines)
                for line in lines[:20]:
                    say(f"  {line}")
                say(f"  {len(lines)} differences")
        if options.keep is not None:
            for name in MAKERS:
                path = place.make(name)
                (shutil.copytree if path.is_dir() else shutil.copy)(path, options.keep / name)
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
