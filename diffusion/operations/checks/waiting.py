"""Why training waits for data, as far as the machine shows it, and what to do about it."""

from dataclasses import dataclass

from diffusion.operations.checks.counters import Usage
from diffusion.operations.checks.verdicts import size_text

ALL_BUSY = 0.9
"""Share of the cores' time that counts as all of it."""

WORKER_BUSY = 0.75
"""Share of a core above which a loader worker computes all the time."""

DISK_WAITING = 0.1
"""Share of the cores' time spent waiting for a disk that makes the disk the cause."""


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What the explanation has to know of the loader."""

    num_workers: int
    """Of a rank."""

    num_cores: int
    """Of the machine."""

    decodes: bool
    """Whether images are decoded while training."""

    has_cache_limit: bool = False


def explain_waiting(usage: Usage | None, downloaded: float, settings: LoaderSettings) -> str:
    """Say why the loader is the limit, and what to do.

    Args:
        usage: of the busiest machine; None if it is not known.
        downloaded: bytes per second that all nodes downloaded.
        settings: the loader.
    """
    if settings.num_workers == 0:
        return "batches are loaded in the training process: set data.num_workers (8 on a large machine)"
    if usage is None:
        return "the cause is not known"
    workers = usage.workers or 0.0
    if usage.cpu >= ALL_BUSY:
        remedy = "encode the images beforehand (scripts/encode.py)" if settings.decodes else "use fewer processes"
        return f"all {settings.num_cores} cores are busy ({usage.cpu:.0%}): {remedy}, or take machines with more cores"
    if workers >= WORKER_BUSY:
        return (
            f"each of the {settings.num_workers} loader workers of a rank computes all the time ({workers:.0%}), and "
            f"cores are free ({usage.cpu:.0%} of {settings.num_cores} busy): raise data.num_workers"
        )
    if downloaded > 0:
        remedy = "raise data.cache_limit so that shards stay, " if settings.has_cache_limit else ""
        return (
            f"shards are downloading at {size_text(downloaded)}/s while the loader workers idle ({workers:.0%} busy): "
            f"{remedy}raise data.predownload, or bring the data nearer"
        )
    if usage.cpu_waiting >= DISK_WAITING:
        return (
            f"the disk gives {size_text(usage.disk_read)}/s and cores wait for it ({usage.cpu_waiting:.0%} of their "
            "time): put data.local on a faster disk"
        )
    return (
        f"the loader workers idle ({workers:.0%} busy) though nothing is downloaded: the data set itself waits for "
        "something; raise data.num_workers so that more of it waits at the same time"
    )
