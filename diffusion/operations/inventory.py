"""Inventory of folders and object stores: data sets, checkpoints and caches, their users and costs."""

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from diffusion import storage
from diffusion.checkpointing.layout import batch_of
from diffusion.config.fields import size_text
from diffusion.config.schema import Config
from diffusion.datasets.cache import LOCKS
from diffusion.datasets.streams import located_streams
from diffusion.errors import ConfigurationError
from diffusion.formats.data_set import ENCODED, MANIFEST, SCAN, WORK, PreparedManifest
from diffusion.formats.run_folder import AVERAGES, CHECKPOINTS, checkpoint_folder, is_run
from diffusion.operations.costs import StartCosts
from diffusion.operations.runs import absolute, checkpoints_of
from diffusion.planning.amounts import DAYS_PER_MONTH, SECONDS_PER_DAY, sum_known
from diffusion.storage import Access, StoredFile, is_url, join

_MANY_USERS = 3
"""Users of an item that are named."""


class ItemKind(str, Enum):
    """Kind of an item."""

    prepared = "prepared data"
    encoded = "encoded data"
    unfinished = "unfinished data"
    """A preparation or encoding that has not ended: it has no manifest."""

    checkpoints = "checkpoints"
    cache = "cache"
    """Shards of data with a remote."""

    other = "other files"


@dataclass(kw_only=True)
class Item:
    """A data set, the checkpoints of a run, a cache, or the other files below a root."""

    uri: str
    kind: ItemKind
    num_files: int = 0
    num_bytes: int = 0
    written: float | None = None
    """Time of the newest file, in seconds since 1970; None where the store does not say."""

    digest: str | None = None
    """SHA-256 of the manifest."""

    source: str | None = None
    """SHA-256 of the manifest of the prepared data that encoded data was made from."""

    users: list[str] = field(default_factory=list)
    """Runs, evaluations, and encoded data made from it."""

    def add(self, num_files: int, num_bytes: int, written: float | None) -> None:
        """Count files, of which the newest was written at a time."""
        self.num_files += num_files
        self.num_bytes += num_bytes
        self.written = max(filter(None, (self.written, written)), default=None)


def find_items(root: str) -> list[Item]:
    """Find what lies below a folder or `s3://bucket/prefix`, by one listing and the manifests.

    A file belongs to the innermost item around it. So the sizes add up to that of the root.

    Raises:
        ConfigurationError: nothing is there.
        UserError: the store cannot be read.
    """
    kinds: dict[PurePosixPath, ItemKind] = {PurePosixPath(): ItemKind.other}
    manifests: set[PurePosixPath] = set()
    folders: dict[PurePosixPath, Item] = {}
    for name, file in list_below(root):
        path = PurePosixPath(name)
        kinds |= _kinds_around(path)
        if path.name == MANIFEST:
            manifests.add(path.parent)
        folders.setdefault(path.parent, Item(uri="", kind=ItemKind.other)).add(1, file.size, file.time)
    if not folders:
        raise ConfigurationError(f"{root} holds no files: correct the path, or S3_ENDPOINT_URL")
    items = {path: Item(uri=join(root, *path.parts), kind=kind) for path, kind in kinds.items()}
    items |= {path: item for path in manifests if (item := _read_data_set(join(root, *path.parts))) is not None}
    for path, files in folders.items():
        item = next(items[one] for one in (path, *path.parents) if one in items)
        item.add(files.num_files, files.num_bytes, files.written)
    return [item for _, item in sorted(items.items()) if item.num_files]


def list_below(root: str, access: Access | None = None) -> Iterator[tuple[str, StoredFile]]:
    """List the files below a root by their names below it; none if there is no such folder."""
    base = root.rstrip("/") + "/"
    for file in tqdm(storage.iterate_files(root, access), desc=root, unit=" files", disable=None, leave=False):
        yield file.uri.removeprefix(base), file


def _kinds_around(file: PurePosixPath) -> dict[PurePosixPath, ItemKind]:
    """Kinds of the items that the path of a file implies, by the path of the item."""
    found: dict[PurePosixPath, ItemKind] = {}
    for part, folder in zip(reversed(file.parts), file.parents, strict=True):
        if batch_of(Path(part)) >= 0:
            found[folder] = ItemKind.checkpoints
        elif part == LOCKS:  # In the folder of each stream: those of a data set are one cache.
            found[folder.parent] = ItemKind.cache
        elif part in (WORK, SCAN):
            found[folder] = ItemKind.unfinished
    return found


def _read_data_set(uri: str) -> Item | None:
    """Read the manifest of a data set; None if it is not one of this package."""
    content = storage.read(join(uri, MANIFEST))
    try:
        manifest = json.loads(content)
        kind = {PreparedManifest.KIND: ItemKind.prepared, ENCODED: ItemKind.encoded}[manifest["kind"]]
    except (ValueError, KeyError, TypeError):
        return None
    source = manifest.get("source") if kind is ItemKind.encoded else None
    return Item(uri=uri, kind=kind, digest=hashlib.sha256(content).hexdigest(), source=source)


# Use


def read_uses(run: Path, config: Config) -> list[str]:
    """The locations that a run reads or writes: streams, their caches, checkpoints, initial weights."""
    uses = [checkpoints_of(run, config)]
    for _, stream in located_streams(config):
        uses += [absolute(run, stream.local), *([stream.remote] if stream.remote else [])]
    if config.init_from is not None:
        uses += locations_of_model(absolute(run, config.init_from.checkpoint))
    return uses


def locations_of_model(location: str) -> list[str]:
    """The location of a model and, if it is a run folder or a checkpoint named below one, the run's checkpoints."""
    runs = [] if is_url(location) else [Path(location), Path(location).parent]
    return [location, *(checkpoint_folder(run) or str(run / CHECKPOINTS) for run in runs if is_run(run))]


def assign_users(items: Sequence[Item], uses: Mapping[str, Iterable[str]]) -> None:
    """Set the users of items, of all roots, from the locations of each user."""
    prefixes = {user: {_prefix(one) for one in locations} for user, locations in uses.items()}
    encoded = defaultdict(list)
    for item in items:
        encoded[item.source].append(item.uri)
    for item in items:
        if item.kind is ItemKind.other:
            continue
        own = _prefix(item.uri)
        item.users = [
            user for user, those in prefixes.items() if any(own.startswith(one) or one.startswith(own) for one in those)
        ]
        item.users += encoded[item.digest] if item.digest is not None else []


def _prefix(location: str) -> str:
    """Common beginning of the absolute paths or URIs of everything in a location."""
    return location.rstrip("/") + "/" if is_url(location) else f"{Path(location).expanduser().resolve()}/"


def inventory_rows(items: Sequence[Item], storage_price: float | None) -> list[tuple[str, ...]]:
    """Rows of a table of items with users, and their sum. The price is in dollars per TB and month, None if unknown."""

    def amounts(files: int, size: int) -> tuple[str, str, str]:
        dollars = "-" if storage_price is None else f"{size / 1e12 * storage_price:,.2f}"
        return f"{files:,}", size_text(size), dollars

    rows: list[tuple[str, ...]] = [
        ("location", "content", "files", "size", "dollars a month", "days old", "used by"),
    ]
    for item in items:
        days = "-" if item.written is None else f"{max(0.0, time.time() - item.written) / SECONDS_PER_DAY:,.1f}"
        users = ", ".join(item.users[:_MANY_USERS]) or "-"
        if len(item.users) > _MANY_USERS:
            users += f" and {len(item.users) - _MANY_USERS} more"
        rows.append((item.uri, item.kind.value, *amounts(item.num_files, item.num_bytes), days, users))
    sums = amounts(sum(item.num_files for item in items), sum(item.num_bytes for item in items))
    return [*rows, ("sum", "", *sums, "", "")]


# One run


def stored_bytes(run: Path, config: Config) -> tuple[int, list[str]]:
    """Stored bytes of a run's checkpoints, averages and streams, and the folders that are not on this machine."""
    locations = {checkpoints_of(run, config): Access()}
    if (run / AVERAGES).is_dir() and not is_url(config.trainer.checkpoint_folder or ""):  # A store has them, too.
        locations[str(run.resolve() / AVERAGES)] = Access()
    locations |= {absolute(run, stream.source): stream.access for _, stream in located_streams(config)}
    absent = [one for one in locations if not is_url(one) and not Path(one).is_dir()]
    present = {one: access for one, access in locations.items() if one not in absent}
    return sum(file.size for one, access in present.items() for _, file in list_below(one, access)), absent


def expense_rows(
    starts: Sequence[StartCosts],
    num_bytes: int,
    num_steps: int,
    *,
    gpu_price: float | None,
    storage_price: float | None,
    egress_price: float | None,
) -> list[tuple[str, ...]]:
    """Rows of a table of GPU time, storage and traffic of a run, and their sum: so far, and at this rate at its end.

    The bytes are stored from the first start to the last update. Prices are in dollars: per GPU-hour of starts without
    a price of their own, per TB and month, and per TB read from the store; those of None are unknown.
    """
    step, days = starts[-1].reached, (starts[-1].ended - starts[0].began) / SECONDS_PER_DAY
    gpu_prices = [gpu_price if start.price is None else start.price for start in starts]
    fetched_bytes = sum(start.fetched_bytes for start in starts)
    dollars = {
        ("GPU time", f"{sum(start.gpu_hours for start in starts):,.2f} GPU-hours"): sum_known(
            None if price is None else price * start.gpu_hours for price, start in zip(gpu_prices, starts, strict=True)
        ),
        ("storage", f"{size_text(num_bytes)} for {days:,.1f} days"): (
            None if storage_price is None else num_bytes / 1e12 * days / DAYS_PER_MONTH * storage_price
        ),
        ("traffic", f"{size_text(fetched_bytes)} read"): (
            None if egress_price is None else fetched_bytes / 1e12 * egress_price
        ),
    }
    rows: list[tuple[str, ...]] = [("", "so far", "dollars", f"dollars at step {num_steps:,}")]
    for names, now in {**dollars, ("sum", ""): sum_known(dollars.values())}.items():
        end = None if now is None or not step else now * num_steps / step
        rows.append((*names, *("-" if one is None else f"{one:,.2f}" for one in (now, end))))
    return rows
