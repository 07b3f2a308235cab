"""Encode prepared images once: the VAE's posterior, the captions' token ids and, if wanted, their text embeddings.

The work is cut by prepared shard. Each is encoded in batches of its own and written whole, so that neither the number
of processes nor an interruption changes a byte. On a CPU each process computes with one thread, since sums depend on
their number; several processes use several cores. (The bytes depend on the machine as far as rounding does: kind of
device and library versions.)
"""

import contextlib
import hashlib
import itertools
import logging
import math
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from diffusion import storage
from diffusion.config.data import ImageSize, named_size
from diffusion.datasets.bad_images import MAX_BAD_FRACTION, MAX_BAD_IMAGES, max_bad
from diffusion.datasets.buckets import lowest_side
from diffusion.datasets.encoded import EncodedManifest
from diffusion.datasets.transforms import ImageTransform
from diffusion.distributed import agree, has_process_group, on_first_rank
from diffusion.errors import ConfigurationError, DataError
from diffusion.formats.data_set import MANIFEST, PreparedManifest, read_marks
from diffusion.formats.shards import Shard, check_sizes, read_index, shards_with_indices
from diffusion.models.latents import latent_space
from diffusion.preparation.encoding.models import EncodingModels, Load
from diffusion.preparation.encoding.output import EncodingSettings, Output, ShardTask
from diffusion.preparation.encoding.shards import EncodedShard, encode_shards
from diffusion.preparation.engine import Workers, progress_bar, run
from diffusion.preparation.output import claim, resolved
from diffusion.storage import is_url, join, shown

logger = logging.getLogger(__name__)

MAX_SHARD_BYTES = 2**30
"""A shard begins where a prepared one begins, and at this size."""

_SHARDS_PER_TASK = 4
"""Shards that a worker encodes without a pause between them, where there are many."""


def encode(
    prepared: str | Path,
    out: str | Path,
    *,
    models: EncodingModels,
    resolutions: Sequence[int] = (),
    batch_size: int = 32,
    device: str = "cpu",
    precision: str = "fp32",
    mean_only: bool = False,
    scores: Sequence[str] = (),
    num_workers: int = 0,
    workers: Workers | None = None,
    load: Load | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> list[EncodedManifest]:
    """Encode the buckets that are large enough: those by the shorter side at the resolutions, others at their size.

    All ranks of a launcher call it, if there is one (`start_process_group`); all processes see local folders. The same
    call again continues an encoding that was stopped, encodes what the prepared data has grown by, and marks what was
    removed since. Shards hold the samples that the prepared ones hold, unless one would be too large: the global order
    of training goes by shards, and so it is the same for images and latents.

    Args:
        prepared: Output of `prepare`: a path or an s3:// URI.
        out: Folder to write, likewise: one data set, or for several resolutions one in a folder of its name each.
        models: The networks.
        resolutions: Sides of the squares in pixels, multiples of the VAE's factor; each image is decoded once for
            all. May be empty if all buckets have sizes of their own.
        batch_size: Images of a forward pass; it changes the result by rounding, and so is part of the manifest.
        device: Torch device of the networks. With `cuda` each of the workers has a GPU of its own.
        precision: `fp32`, or `bf16` for autocast.
        mean_only: Leave the log-variance out; there is none where the VAE has no posterior.
        scores: Scores to store, by their keys in the metadata of the samples.
        num_workers: Processes that decode, for each process that encodes; 0 decodes in that one.
        workers: Other processes that encode, with networks from `load`; None encodes in this one and the other ranks.
        load: Loads the networks in each of the workers.
        max_shard_bytes: Size above which a shard is cut into several.
        progress: Show a bar on stderr.

    Returns:
        The manifests that were written, in the order of the resolutions.

    Raises:
        ConfigurationError: A resolution does not fit the VAE, or `out` and `prepared` lie in one another.
        DataError: `prepared` is not prepared data or is damaged; `out` holds something else; too many images cannot
            be decoded.
        MachineError: `out` cannot be written to, or another process writes there; a worker died.
    """
    prepared, out = _absolute(prepared), _absolute(out)
    settings = EncodingSettings(
        batch_size=batch_size,
        precision=precision,
        mean_only=mean_only or not latent_space(models.vae).has_posterior,
        scores=tuple(scores),
        max_shard_bytes=max_shard_bytes,
    )
    with ExitStack() as claims:
        plan = on_first_rank(lambda: _plan(prepared, out, resolutions, models, settings, claims))
        counters = _Counters(plan.name)
        if not plan.tasks:
            logger.info("%s holds all of %s already", shown(out), shown(prepared))
        elif workers is None:
            tasks = _taken(plan.tasks, counters)
            shards = encode_shards(tasks, models, plan.settings, device=device, num_workers=num_workers)
            agree(lambda: _count(shards, plan, counters, progress))
        else:
            assert load is not None, "workers load their networks"
            shards = _encoded_by_workers(plan, workers, load, device.partition(":")[0], num_workers)
            _count(shards, plan, counters, progress)
        on_first_rank(lambda: _finish(prepared, plan.outputs, counters))
    return [output.manifest for output in plan.outputs]


def check_folders(prepared: str, out: str, resolutions: Sequence[int]) -> None:
    """Check, before networks are loaded, that there is prepared data, and that the output can be written to.

    Raises:
        UserError: as of `encode`.
    """
    prepared = _absolute(prepared)
    _check_resolutions(PreparedManifest.read(prepared), resolutions)
    for uri in _output_folders(prepared, _absolute(out), resolutions):
        with claim(uri):
            pass


def _check_resolutions(manifest: PreparedManifest, resolutions: Sequence[int]) -> None:
    if len(set(resolutions)) != len(resolutions):
        raise ConfigurationError(f"--resolution {' '.join(map(str, resolutions))}: give each once")
    squares = sorted(name for buckets in manifest.splits.values() for name in buckets if not named_size(name))
    if squares and not resolutions:
        raise ConfigurationError(f"--resolution is missing: the images of {squares[0]} are cut to squares of it")


def _output_folders(prepared: str, out: str, resolutions: Sequence[int]) -> list[str]:
    """Return the folder of each data set; a ConfigurationError if it and the prepared data lie in one another."""
    uris = [join(out, str(one)) for one in resolutions] if len(resolutions) > 1 else [out]
    for uri in uris:
        here, there = f"{resolved(uri)}/", f"{resolved(prepared)}/"
        if here.startswith(there) or there.startswith(here):
            raise ConfigurationError(
                f"{shown(uri)} and the prepared data {shown(prepared)} lie in one another: choose "
                "another folder to write"
            )
    return uris


@dataclass(frozen=True)
class _Plan:
    """An encoding, the same on all ranks."""

    name: str
    """Unique within the process group."""
    outputs: list[Output]
    tasks: list[ShardTask]
    """Prepared shards that are missing."""
    settings: EncodingSettings


def _plan(
    prepared: str,
    out: str,
    resolutions: Sequence[int],
    models: EncodingModels,
    settings: EncodingSettings,
    claims: ExitStack,
) -> _Plan:
    """Claim the folders, and look at what is there."""
    settings = replace(settings, convert_to_srgb=PreparedManifest.read(prepared).convert_to_srgb)
    outputs = _plan_outputs(prepared, out, resolutions, models, settings)
    for output in outputs:
        claims.enter_context(claim(output.uri))
        output.open(prepared)
    settings = replace(settings, removed=frozenset().union(*(output.removed for output in outputs)))
    return _Plan(uuid.uuid4().hex, outputs, _missing_shards(prepared, outputs), settings)


def _plan_outputs(
    prepared: str, out: str, resolutions: Sequence[int], models: EncodingModels, settings: EncodingSettings
) -> list[Output]:
    """Decide which data sets are written: one in `out`, or one in `out/<resolution>` of several.

    The indexes of the prepared data are read, and compared with its manifest.

    Raises:
        ConfigurationError: A resolution is missing, given twice, or does not fit the VAE; or one of the folders lies in
            the other.
        DataError: `prepared` is not prepared data, is damaged, or has no images that are large enough.
    """
    manifest = PreparedManifest.read(prepared)
    _check_resolutions(manifest, resolutions)
    for resolution in resolutions:
        models.latent_shape(ImageSize(resolution, resolution))
    folders: dict[str, list[Shard]] = {}
    for split, buckets in manifest.splits.items():
        for bucket, entry in buckets.items():
            uri = join(prepared, split, bucket)
            index = read_index(uri)
            check_sizes(uri, index.shards)
            if index.summary.sha256 != entry.sha256:
                where = shown(join(prepared, MANIFEST))
                raise DataError(f"{shown(uri)} is not what {where} says: copy or prepare the data set again")
            folders[f"{split}/{bucket}"] = index.shards
    source = hashlib.sha256(storage.read(join(prepared, MANIFEST))).hexdigest()
    names = sorted({name.split("/")[1] for name in folders})
    outputs = []
    for resolution, uri in zip(resolutions or [None], _output_folders(prepared, out, resolutions), strict=True):
        chosen = {name for name in names if named_size(name) or (resolution and lowest_side(name) >= resolution)}
        if not chosen:
            raise DataError(
                f"{shown(prepared)} has no bucket of images whose shorter side is {resolution} or more (there "
                f"are: {', '.join(names) or 'none'}): lower --resolution, or prepare larger images"
            )
        sizes = {name: list(size) for name in sorted(chosen) if (size := named_size(name))}
        for size in sizes.values():
            models.latent_shape(ImageSize(*size))
        side = resolution or round(math.sqrt(max(height * width for height, width in sizes.values())))
        counts: dict[str, dict[str, int]] = {}
        shards = {name: listed for name, listed in folders.items() if name.split("/")[1] in chosen}
        for name, listed in shards.items():
            split, bucket = name.split("/")
            counts.setdefault(split, {})[bucket] = sum(shard.num_samples for shard in listed)
        manifest = EncodedManifest(
            vae=models.vae_identity,
            tokenizer=models.tokenizer_identity,
            text_encoder=models.text_encoder_identity,
            transform=ImageTransform.square(side).identity(),
            resolution=side,
            mean_only=settings.mean_only,
            precision=settings.precision,
            batch_size=settings.batch_size,
            convert_to_srgb=settings.convert_to_srgb,
            empty_ids=[int(i) for i in models.empty_ids],
            scores=list(settings.scores),
            source=source,
            counts=counts,
            sizes=sizes,
        )
        outputs.append(Output(uri=uri, manifest=manifest, folders=shards))
    return outputs


def _missing_shards(prepared: str, outputs: Sequence[Output]) -> list[ShardTask]:
    """List the prepared shards that some data set lacks."""
    removed, tasks = read_marks(prepared), []
    folders = {name: shards for output in outputs for name, shards in output.folders.items()}
    for name, shards in sorted(folders.items()):
        sizes = {output.uri: output.manifest.size_of(name.partition("/")[2]) for output in outputs}
        for number, (_, shard, inside) in enumerate(shards_with_indices(shards, removed.get(name, []))):
            targets = {output.uri: sizes[output.uri] for output in outputs if output.lacks(name, number)}
            if targets:
                gone = frozenset(inside)
                tasks.append(
                    ShardTask(prepared=prepared, name=name, number=number, shard=shard, removed=gone, targets=targets)
                )
    return tasks


def _taken(tasks: Sequence[ShardTask], counters: "_Counters") -> Iterator[ShardTask]:
    """Take tasks from those that all ranks share, until there are none, or a rank has failed."""
    while (number := counters.add("taken", 1) - 1) < len(tasks) and not counters.add("failed", 0):
        yield tasks[number]


def _encoded_by_workers(
    plan: _Plan, workers: Workers, load: Load, device: str, num_workers: int
) -> Generator[EncodedShard, None, None]:
    """Encode shards in other processes, on a kind of device."""
    size = max(1, min(_SHARDS_PER_TASK, len(plan.tasks) // 64))
    tasks = [plan.tasks[start : start + size] for start in range(0, len(plan.tasks), size)]
    settings, num_gpus = plan.settings, 1.0 if device == "cuda" else 0.0

    def make() -> Callable[[list[ShardTask]], list[EncodedShard]]:
        models = load()
        return lambda tasks: list(encode_shards(tasks, models, settings, device=device, num_workers=num_workers))

    yield from itertools.chain.from_iterable(run(workers, make, tasks, num_gpus=num_gpus, describe=_describe))


def _describe(tasks: Sequence[ShardTask]) -> str:
    return " or ".join(shown(join(one.folder, one.shard.stored.name)) for one in tasks)


class _Counters:
    """Numbers from 0 that all ranks share, in the store of the process group if there is one."""

    def __init__(self, name: str) -> None:
        self._name, self._values = name, Counter[str]()

    def add(self, name: str, amount: int) -> int:
        """Add to a number; return it."""
        if has_process_group():
            from torch.distributed import distributed_c10d

            return distributed_c10d._get_default_store().add(f"diffusion/encode/{self._name}/{name}", amount)
        self._values[name] += amount
        return self._values[name]


def _count(shards: Generator[EncodedShard, None, None], plan: _Plan, counters: _Counters, progress: bool) -> None:
    """Count shards as they are encoded; a DataError if too many images are damaged."""
    before = max(output.num_damaged for output in plan.outputs)
    num_samples = max(output.num_samples for output in plan.outputs)
    total = sum(task.shard.num_samples for task in plan.tasks)
    try:
        # A failure ends writers and workers before the claim is released.
        with contextlib.closing(shards), progress_bar("encoding", total, shown=progress) as bar:
            for shard in shards:
                for what in shard.damaged:
                    num_damaged = before + counters.add("damaged", 1)
                    logger.warning("%s; it is marked as damaged (%d of %d so far)", what, num_damaged, num_samples)
                    if num_damaged > max_bad(num_samples):
                        raise DataError(
                            f"{num_damaged} of {num_samples} images are damaged (at most {MAX_BAD_IMAGES} or "
                            f"{MAX_BAD_FRACTION:.1%} may be), the last: {what}. Check the disk, and copy or prepare "
                            "the data set again"
                        )
                counters.add("captions", shard.num_captions)
                counters.add("full", shard.num_full)
                bar.update(counters.add("images", shard.num_samples) - bar.n)
    except BaseException:
        with contextlib.suppress(Exception):  # The store may be gone, which is not to hide the failure.
            counters.add("failed", 1)
        raise


def _finish(prepared: str, outputs: Sequence[Output], counters: _Counters) -> None:
    if num_full := counters.add("full", 0):
        num_captions = counters.add("captions", 0)
        logger.warning("%d of %d captions (%.1f%%) take all tokens of the text encoder: longer ones are cut; see "
                       "model.text_encoder", num_full, num_captions, 100 * num_full / num_captions)  # fmt: skip
    removed = read_marks(prepared)
    for output in outputs:
        output.finish(removed)


def _absolute(uri: str | Path) -> str:
    return str(uri) if is_url(str(uri)) else str(Path(uri).absolute())
