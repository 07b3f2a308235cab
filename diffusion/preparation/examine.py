"""Images of many records decoded at the same time, with a bounded number of them in memory."""

import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool

from joblib import Parallel, delayed

from diffusion.datasets.images import Verdict, examine
from diffusion.errors import MachineError
from diffusion.preparation.records import Record, Refused

_TASK_IMAGES = 16
_ROUND_IMAGES = 128
_ROUND_BYTES = 64 * 2**20


def examine_records(
    records: Iterable[Record | Refused], num_workers: int
) -> Iterator[list[tuple[Record | Refused, Verdict | None]]]:
    """Decode the image of each record.

    Records are read in rounds, at most 128 images and about 64 MB per worker; while the workers decode one round the
    next is read and the one before is with the caller. Processes are joblib's, so `joblib.parallel_config` can put them
    elsewhere.

    Args:
        records: Records, and refusals, which are passed on.
        num_workers: Processes; with 1 the calling one decodes.

    Yields:
        A round: each record with its verdict, each refusal with None, in the order given.

    Raises:
        MachineError: A worker process died, or memory ran out.
    """
    rounds = _rounds(iter(records), num_workers)
    current: list[Record | Refused] = []
    try:
        with Parallel(n_jobs=num_workers, return_as="generator", pre_dispatch="all", max_nbytes=None) as parallel:
            current = next(rounds, [])
            running = parallel(_tasks(current))
            while current:
                following = next(rounds, [])
                verdicts: Iterator[Verdict] = itertools.chain.from_iterable(list(running))  # pyright: ignore
                running = parallel(_tasks(following))
                yield [(record, next(verdicts) if isinstance(record, Record) else None) for record in current]
                current = following
            list(running)
    except (BrokenProcessPool, MemoryError) as error:
        between = f" between {current[0].key} and {current[-1].key}" if current else ""
        raise MachineError(
            f"a process that decodes pictures died or ran out of memory{between}; use fewer workers; "
            "if that does not help, take the picture out"
        ) from error


def _rounds(records: Iterator[Record | Refused], num_workers: int) -> Iterator[list[Record | Refused]]:
    """Cut the records into lists of bounded size."""
    current: list[Record | Refused] = []
    num_bytes = 0
    for record in records:
        current.append(record)
        num_bytes += len(record.image) if isinstance(record, Record) else 0
        if len(current) >= _ROUND_IMAGES * num_workers or num_bytes >= _ROUND_BYTES * num_workers:
            yield current
            current, num_bytes = [], 0
    if current:
        yield current


def _tasks(records: list[Record | Refused]) -> list:
    """Cut the images of a round into calls."""
    images = [record.image for record in records if isinstance(record, Record)]
    return [delayed(examine)(images[start : start + _TASK_IMAGES]) for start in range(0, len(images), _TASK_IMAGES)]
