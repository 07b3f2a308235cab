"""Encode prepared images once: the VAE's posterior, the captions' token ids and, if wanted, their text embeddings.

The work is cut by prepared shard. Several processes take shards as they can; each is encoded in batches of its own and
written whole, so that neither the number of processes nor an interruption changes a byte. On a CPU each process
computes with one thread, since sums depend on their number; several processes use several cores. (The bytes depend on
the machine as far as rounding does: kind of device and library versions.)
"""

import logging
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from diffusion.datasets.encoded import EncodedManifest
from diffusion.distributed import agree, on_first_rank, rank
from diffusion.errors import ConfigurationError
from diffusion.preparation.encoding.images import Item
from diffusion.preparation.encoding.models import EncodingModels
from diffusion.preparation.encoding.output import OutputState, look_at
from diffusion.preparation.encoding.plan import Output, plan_outputs, shard_identity
from diffusion.preparation.encoding.ranks import RayWorkers, shared_counters
from diffusion.preparation.encoding.work import Work, encode_items
from diffusion.preparation.encoding.writer import MAX_SHARD_BYTES
from diffusion.preparation.output_folder import locked, writing
from diffusion.preparation.withdrawal import KEYS, read_keys, read_marks

logger = logging.getLogger(__name__)


def encode(
    prepared: Path,
    out: Path,
    *,
    models: EncodingModels,
    resolutions: Sequence[int] = (),
    batch_size: int = 32,
    device: str = "cpu",
    precision: str = "fp32",
    mean_only: bool = False,
    num_workers: int = 0,
    ray: RayWorkers | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> list[EncodedManifest]:
    """Encode the buckets that are large enough: those by the shorter side at the resolutions, others at their size.

    All ranks of a launcher call it, if there is one (`start_process_group`); prepared and encoded data lie on a file
    system that all of them see. The same call again continues one that was stopped, encodes what the prepared data
    grew by, and marks what was withdrawn since. Shards hold the samples that the prepared ones hold, unless one would
    be too large: the global order of training goes by shards, and so it is the same for images and latents.

    Args:
        prepared: Output of `prepare`.
        out: Folder to write: one data set, or for several resolutions one in a folder of its name each.
        models: What encodes.
        resolutions: Sides of the squares in pixels, multiples of the VAE's factor; each image is decoded once for
            all. May be empty where all buckets have sizes of their own.
        batch_size: Images of a forward pass; it changes the result by rounding, and so is part of the manifest.
        device: Torch device of the networks.
        precision: `fp32`, or `bf16` for autocast.
        mean_only: Leave the log-variance out.
        num_workers: Processes that decode, for each process that encodes; 0 decodes in that one.
        ray: Encode in actors of a Ray cluster, not here.
        max_shard_bytes: Size above which another shard is begun.
        progress: Show a bar on stderr.

    Returns:
        The manifests that were written, in the order of the resolutions.

    Raises:
        ConfigurationError: A resolution does not fit the VAE, or `out` is `prepared`.
        DataError: `prepared` is not prepared data or is damaged; `out` holds something else; too many images cannot
            be decoded.
        MachineError: `out` cannot be written to, or another process writes there.
    """
    if batch_size < 1 or num_workers < 0:
        raise ConfigurationError("--batch-size must be at least 1 and --workers at least 0")
    prepared, out = prepared.absolute(), out.absolute()
    with ExitStack() as locks:

        def plan() -> tuple[list[OutputState], Work]:
            outputs = plan_outputs(
                prepared,
                out,
                models=models,
                resolutions=resolutions,
                batch_size=batch_size,
                precision=precision,
                mean_only=mean_only,
            )
            states = []
            for output in outputs:
                look_at(prepared, output)
                with writing(output.folder):
                    output.folder.mkdir(parents=True, exist_ok=True)
                locks.enter_context(locked(output.folder))
                states.append(look_at(prepared, output))
            work = Work(
                name=uuid.uuid4().hex,
                items=_missing(prepared, states),
                outs=[output.folder for output in outputs],
                num_samples=max(output.num_samples for output in outputs),
                num_damaged=max(state.num_damaged() for state in states),
                withdrawn_keys=_withdrawn_keys(outputs),
                batch_size=batch_size,
                precision=precision,
                mean_only=mean_only,
                max_shard_bytes=max_shard_bytes,
            )
            return states, work

        states, work = on_first_rank(plan)
        options = {"device": device, "num_workers": num_workers}
        if not work.items:
            logger.info("%s holds all of %s already", out, prepared)
        elif ray is not None:
            ray.encode_items(work, **options)
        else:
            counters = shared_counters(work.name)
            shown = progress and rank() == 0
            agree(lambda: encode_items(work, models, counters, progress=shown, **options))
        on_first_rank(lambda: _finish(prepared, states))
    return [state.output.manifest for state in states]


def _missing(prepared: Path, states: list[OutputState]) -> list[Item]:
    """Return the prepared shards that some data set lacks; make ready what lacks one."""
    marks, items = read_marks(prepared), []
    entered: set[int] = set()
    places = {name: place for state in states for name, place in state.output.places.items()}
    for name, place in sorted(places.items()):
        first, withdrawn = 0, np.array(sorted(marks.get(name, [])), np.int64)
        for number, entry in enumerate(place.shards):
            inside = withdrawn[(withdrawn >= first) & (withdrawn < first + entry["samples"])] - first
            first += entry["samples"]
            wanted = [state.target(i, place, number) for i, state in enumerate(states) if name in state.output.places]
            targets = tuple(target for target in wanted if target is not None)
            for i in {target.output for target in targets} - entered:
                states[i].enter()
                entered.add(i)
            if targets:
                items.append(
                    Item(
                        place=name,
                        number=number,
                        folder=place.folder,
                        entry=entry,
                        source=shard_identity(entry),
                        withdrawn=frozenset(inside.tolist()),
                        targets=targets,
                    )
                )
    return items


def _withdrawn_keys(outputs: Sequence[Output]) -> frozenset[str]:
    """Read the keys that were withdrawn from the encoded data sets themselves."""
    files = [output.folder / KEYS for output in outputs]
    return frozenset().union(*(read_keys(file) for file in files if file.is_file()))


def _finish(prepared: Path, states: list[OutputState]) -> None:
    """Finish the data sets."""
    withdrawn = read_marks(prepared)
    for state in states:
        state.finish(withdrawn)
