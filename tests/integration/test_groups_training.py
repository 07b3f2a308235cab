"""Streams of several sizes trained in one step (groups) and step by step (buckets): the machines do not matter."""

from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from diffusion.config.loading import load_config
from diffusion.datasets.batch import SHAPED, BatchKey, num_samples, split_batch
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from tests.tools.written_data import TEXT, smooth_image, write_mds, write_prepared

NUM_STEPS = 8
COUNTS = {"square": 40, "wide": 28, "tall": 20}
"""Images: 22 groups of 4, five global batches of 16 in an epoch."""

SIZES = {"square": [32, 32], "wide": [24, 40], "tall": [40, 24]}
VALIDATION = {"square": 7, "wide": 4, "tall": 2}
"""Validation images of each stream."""

Run = tuple[str, list[str]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in three buckets in images/, and their latents in latents/."""
    from diffusion.models import tiny
    from diffusion.models.pretrained import module_identity, tokenizer_identity
    from diffusion.models.tokenizers import tokenize

    root = tmp_path_factory.mktemp("sizes")
    write_prepared(root / "images", COUNTS)
    write_prepared(root / "validation", VALIDATION)
    model = tiny()
    for split, counts in (("train", COUNTS), ("validation", VALIDATION)):
        for name in counts:
            _encode(root / "latents" / split / name, name, counts[name], model)
    _write_manifest(
        root / "latents",
        vae=module_identity(model.vae),
        tokenizer=tokenizer_identity(model.tokenizer),
        empty_ids=tokenize(model.tokenizer, [""])[0].tolist(),
    )
    return root


def _encode(folder: Path, name: str, num: int, model) -> None:
    """Write the latents of the images that `write_prepared` writes, shard by shard as these."""
    from diffusion.config.data import ImageSize
    from diffusion.datasets.transforms import ImageTransform
    from diffusion.models.tokenizers import tokenize

    transform = ImageTransform(size=ImageSize(*SIZES[name]))
    samples = []
    for number in range(num):
        pixels = torch.from_numpy(transform(smooth_image(number))[None]) / 127.5 - 1
        with torch.no_grad():
            posterior = model.vae.encode(pixels).latent_dist
        samples.append(
            {
                "latent_mean": posterior.mean[0].half().numpy(),
                "latent_logvar": posterior.logvar[0].half().numpy(),
                "token_ids": tokenize(model.tokenizer, [f"{number} {name} 0"]).astype(np.int32),
                "key": f"{name}/{number}",
            }
        )
    shape = ",".join(map(str, samples[0]["latent_mean"].shape))
    columns = dict.fromkeys(("latent_mean", "latent_logvar"), f"ndarray:float16:{shape}") | TEXT
    write_mds(folder, columns, samples, size_limit=2**20)


def _write_manifest(root: Path, **identities) -> None:
    from diffusion.datasets.encoded import EncodedManifest
    from diffusion.datasets.transforms import ImageTransform
    from diffusion.files import write_json
    from diffusion.formats.data_set import MANIFEST

    manifest = EncodedManifest(
        transform=ImageTransform.square(32).identity(),
        resolution=32,
        mean_only=False,
        precision="fp32",
        source="",
        counts={"train": COUNTS, "validation": VALIDATION},
        sizes={name: size for name, size in SIZES.items() if name != "square"},
        **identities,
    )
    write_json(root / MANIFEST, asdict(manifest))


def overrides(data: Path, kind: str = "images", mixing: str = "groups") -> list[str]:
    """The toy run on the data."""
    streams = ", ".join(f"{{name: {name}, resolution: {size}}}" for name, size in SIZES.items())
    train, validation = {
        "images": (data / "images" / "train", data / "validation" / "train"),
        "latents": (data / "latents" / "train", data / "latents" / "validation"),
    }[kind]
    return [
        f"data.representation={'images' if kind == 'images' else 'latents'}",
        f"data.local={train}",
        f"data.streams=[{streams}]",
        f"data.mixing={mixing}",
        f"data.group_size={4 if mixing == 'groups' else 'null'}",
        "data.global_batch_size=16",
        "data.num_canonical_nodes=4",
        "objective.stratified_timesteps=true",
        f"validation={{local: {validation}, device_batch_size: 3}}",
        f"trainer.max_duration={NUM_STEPS}ba",
        "trainer.eval_interval=4ba",
        "trainer.save_interval=100ba",
        "loggers.stream_loss_interval=4",
        "plugins.train_dataset=null",
    ]


def _run(
    data: Path,
    root: Path,
    name: str,
    *more: str,
    microbatch: int | None,
    kind: str = "images",
    mixing: str = "groups",
) -> Run:
    changes = [*overrides(data, kind, mixing), *more, f"output_folder={root / name}"]
    if microbatch is not None:
        changes.append(f"trainer.device_train_microbatch_size={microbatch}")
    return "tests/tools/toy.yaml", changes


@pytest.fixture(scope="module")
def runs(server, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs, by name."""
    root = tmp_path_factory.mktemp("groups")

    def record(name: str) -> str:
        return f"plugins.callbacks=[{{path: tests.tools.toys.RecordGradients, arguments: {{path: {root / name}.pt}}}}]"

    run = partial(_run, data, root)
    server.train(1, [run("one", record("one"), microbatch=3)])
    server.train(
        2,
        [
            run("two", record("two"), microbatch=None),
            run("two-ddp", record("two-ddp"), "trainer.parallelism=ddp", microbatch=1),
            run("bucket-two", microbatch=None, mixing="bucket"),
        ],
    )
    return root


@pytest.fixture(scope="module")
def more_runs(server, data: Path, runs: Path) -> Path:
    """Runs of one rank, and interrupted ones, beside the others."""
    run = partial(_run, data, runs)
    server.train(
        1,
        [
            run("images", "data.shuffle=none", microbatch=None),
            run("latents", "data.shuffle=none", microbatch=None, kind="latents"),
            run("bucket-one", microbatch=8, mixing="bucket"),
            run("resumed-on-two", "trainer.max_duration=5ba", microbatch=4),
        ],
    )
    first = run("resumed-on-one", "trainer.max_duration=6ba", microbatch=1)
    server.train(2, [first, run("resumed-on-two", microbatch=2)])
    server.train(1, [run("resumed-on-one", microbatch=4)])
    return runs


def numbers(folder: Path) -> dict[str, list[float]]:
    """All losses of a run by name, each step once; without the evaluation of a run that was to end earlier."""
    rows = read_metrics(folder / "metrics.jsonl")
    assert series(rows, TRAIN_LOSS)[0] == list(range(NUM_STEPS))
    names = sorted({name for row in rows for name in row if "loss" in name})
    assert [name for name in names if "/stream/" in name] == [f"loss/train/stream/{name}" for name in sorted(SIZES)]
    return {
        name: [value for step, value in zip(*series(rows, name), strict=True) if name == TRAIN_LOSS or step % 4 == 0]
        for name in names
    }


@pytest.mark.slow
@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("one", "two"),
        ("one", "two-ddp"),
        ("one", "resumed-on-one"),
        ("one", "resumed-on-two"),
        ("bucket-one", "bucket-two"),
    ],
)
def test_losses_do_not_depend_on_ranks_microbatches_or_interruptions(more_runs: Path, one: str, other: str):
    expected, found = numbers(more_runs / one), numbers(more_runs / other)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=2e-5), name


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_latents_of_several_sizes_give_the_losses_of_the_images(more_runs: Path):
    expected, found = numbers(more_runs / "images"), numbers(more_runs / "latents")
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=2e-3), name


@pytest.mark.world_size(2)
def test_losses_by_stream_add_up_to_the_whole(runs: Path):
    losses = numbers(runs / "two")
    by_stream = [losses[f"metrics/validation/loss/{name}"] for name in SIZES]
    for whole, *parts in zip(losses["metrics/validation/loss"], *by_stream, strict=True):
        mean = sum(part * num for part, num in zip(parts, VALIDATION.values(), strict=True)) / sum(VALIDATION.values())
        assert whole == pytest.approx(mean, rel=1e-5)
    buckets = numbers(runs / "bucket-two")
    steps = _streams_of_steps(runs / "bucket-two")
    assert len({*steps}) == 3
    for number, name in enumerate(SIZES):
        found = buckets.get(f"loss/train/stream/{name}", [])
        losses_of_steps = list(zip(buckets[TRAIN_LOSS], steps, strict=True))
        halves = [[loss for loss, stream in half if stream == number] for half in batched(losses_of_steps, 4)]
        assert found == pytest.approx([sum(half) / len(half) for half in halves if half], rel=1e-5)


def batched(values: list, num: int) -> list[list]:
    return [values[start : start + num] for start in range(0, len(values), num)]


def _streams_of_steps(run: Path) -> list[int]:
    """The stream of each step of a run with buckets."""
    batches = _batches(run)
    return [int(batch[BatchKey.STREAM][0]) for batch in batches]


def _batches(run: Path) -> list[dict]:
    """Global batches of a run."""
    from diffusion.datasets.loader import train_loader
    from diffusion.models.tokenizers import build_tokenizer, tokenize

    config = load_config(str(run / "config.yaml"), [])
    tokenizer = build_tokenizer(config.model.architecture)
    loader = train_loader(config.data, seed=config.seed, tokenize=lambda captions: tokenize(tokenizer, captions))
    return [batch for _ in range(2) for batch in loader][:NUM_STEPS]


@pytest.mark.world_size(2)
def test_gradients_are_those_of_the_mean_over_the_global_batch_in_float64(runs: Path):
    from diffusion.models.build import build_model

    config = load_config(str(runs / "one" / "config.yaml"), [])
    model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=config.seed)
    model.unet.double().register_forward_pre_hook(
        lambda module, inputs: tuple(x.double() if x.is_floating_point() else x for x in inputs)
    )
    (batch,) = _batches(runs / "one")[:1]
    model.num_slots = num_samples(batch)
    batch[BatchKey.SLOT] = torch.arange(model.num_slots)
    assert all(isinstance(value, list) == (key in SHAPED) for key, value in batch.items())
    shapes = set()
    for sample in split_batch(batch, 1):
        shapes.add(tuple(sample[BatchKey.IMAGE].shape[2:]))
        outputs = model(sample)
        ((outputs.prediction - outputs.target.double()).square().mean() / num_samples(batch)).backward()
    assert len(shapes) == 3
    for name in ("one", "two", "two-ddp"):
        gradients = torch.load(runs / f"{name}.pt")
        assert len(gradients) > 50
        for parameter, expected in model.unet.named_parameters():
            found = gradients[f"unet.{parameter}"].double()
            assert (found - expected.grad).norm() <= 1e-4 * expected.grad.norm() + 1e-8, (name, parameter)
