"""Summary of a run's training content by the European Commission's template (AI Act, article 53(1)(d))."""

import datetime
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from jinja2 import Environment, StrictUndefined

from diffusion.checkpointing.read import read_identities
from diffusion.config.locations import weight_locations
from diffusion.config.schema import Config
from diffusion.config.secrets import redact
from diffusion.datasets.provenance import Exposure, licence_of
from diffusion.errors import DataError, printable
from diffusion.files import read_json, read_json_lines, write_atomically
from diffusion.formats.data_set import MANIFEST, REMOVED_SAMPLES, PreparedManifest, SourceEntry
from diffusion.formats.run_folder import STARTS
from diffusion.reports.page import TEMPLATES
from diffusion.reports.tables import markdown_table

URL_COLUMNS = ("url", "URL", "image_url")
"""Columns of the metadata with the address of an image."""


@dataclass(frozen=True)
class Content:
    """Counts of the samples that a run has seen."""

    images: Mapping[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Images by `source`, `licence` and `domain` of their address."""

    draws: Mapping[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Draws by `source` and `licence`."""

    def add(self, one: Exposure) -> None:
        """Count a sample."""
        source, licence = one.key.partition("/")[0], licence_of(one.metadata) or "(none given)"
        for kind, name in (("source", source), ("licence", licence)):
            self.images[kind][name] += 1
            self.draws[kind][name] += one.times
        if host := _host(next((str(one.metadata[name]) for name in URL_COLUMNS if one.metadata.get(name)), "")):
            self.images["domain"][host] += 1


def _host(address: str) -> str:
    """Domain of a web address; empty for other addresses, such as those in an object store."""
    try:
        parts = urlsplit(address)
        return (parts.hostname or "").removeprefix("www.") if parts.scheme in ("http", "https") else ""
    except ValueError:
        return ""


def read_manifests(folders: Sequence[Path]) -> list[PreparedManifest]:
    """Read the manifests of the prepared data of buckets; a DataError if it is encoded data."""
    roots = sorted({folder.parent.parent for folder in folders})
    try:
        return [PreparedManifest.read(root) for root in roots if (root / MANIFEST).is_file()]
    except DataError as error:
        raise DataError(f"{error}. --summary needs prepared data: name it with --data PREPARED/train") from error


def write_summary(
    path: Path,
    content: Content,
    *,
    config: Config,
    checkpoint: Path,
    num_steps: int,
    folders: Sequence[Path],
    runs: Sequence[Path],
) -> None:
    """Write the summary in Markdown, with marks where the provider has to complete it.

    The folders are those of the prepared data's buckets; the run folder may be one of `runs`.
    """
    roots = sorted({folder.parent.parent for folder in folders})
    manifests = read_manifests(folders)
    marks = [read_json(root / REMOVED_SAMPLES) for root in roots if (root / REMOVED_SAMPLES).is_file()]
    starts = next((rows for run in runs if (rows := [*filter(None, read_json_lines(run / STARTS))])), [])
    rejected: Counter[str] = Counter()
    for manifest in manifests:
        rejected.update({reason: entry.count for reason, entry in manifest.rejected.items()})
    places = [f"`{key}`: {redact(str(place))}" for key, place in weight_locations(config).items()]
    hashes = [f"{part.replace('_', ' ')} with hash {value}" for part, value in read_identities(checkpoint).items()]
    num_images, num_domains = content.images["source"].total(), len(content.images["domain"])
    domains = _ranked(content.images["domain"])[: -(-num_domains // 10)]
    values = {
        "today": datetime.date.today().isoformat(),
        "model": f"{config.run_name} {checkpoint.stem} (`{config.model.architecture.value}`)",
        "dependencies": places + hashes,
        "num_images": num_images,
        "size": size_range(num_images),
        "num_draws": content.draws["source"].total(),
        "num_steps": num_steps,
        "batch_size": config.data.global_batch_size,
        "resolution": config.data.resolution,
        "began": starts[0]["time"][:10] if starts else "",
        "sources": _sources(content, [source for manifest in manifests for source in manifest.sources]),
        "licences": _table("licence", _ranked(content.images["licence"])),
        "num_domains": num_domains,
        "num_domains_shown": len(domains),
        "domains": _table("domain", domains),
        "rejected": _table("reason", _ranked(rejected)),
        "num_removed": sum(len(found) for one in marks for name, found in one.items() if name.startswith("train/")),
    }
    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    template = (TEMPLATES / "training_content.md").read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, environment.from_string(template).render(values))


def size_range(num_images: int) -> str:
    """Range of the template that a number of images is in."""
    if num_images < 10**6:
        return "less than 1 million images"
    return "1 million to 1 billion images" if num_images <= 10**9 else "more than 1 billion images"


def _sources(content: Content, entries: Sequence[SourceEntry]) -> str:
    used, draws = content.images["source"], content.draws["source"]
    rows = []
    for name in sorted(used.keys() | {entry.name for entry in entries}):
        own = [entry for entry in entries if entry.name == name]
        places = [", ".join(sorted({redact(getattr(entry, part)) for entry in own})) for part in ("kind", "path")]
        texts = [name, *places]
        numbers = (sum(one.seen for one in own), sum(one.kept for one in own), used[name], draws[name])
        rows.append([*map(_one_line, texts), *map("{:,}".format, numbers)])
    return markdown_table(("source", "kind", "location", "found", "prepared", "used", "draws"), rows)


def _ranked(counts: Counter[str]) -> list[tuple[str, int]]:
    """Names and counts, the largest first, equal ones by name."""
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))


def _table(head: str, counts: Sequence[tuple[str, int]]) -> str:
    """Table of counts of images; empty without rows."""
    return markdown_table((head, "images"), ((_one_line(name), f"{n:,}") for name, n in counts)) if counts else ""


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))
