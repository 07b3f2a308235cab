"""One run from its plan to the manifest: what the parent does between and after the items of the workers."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from diffusion.datasets.buckets import SizeBuckets
from diffusion.datasets.manifest import (
    BucketEntry,
    Generation,
    PreparedManifest,
    PrepareSettings,
    RefusedEntry,
    SourceEntry,
)
from diffusion.datasets.mds import INDEX, ShardFormat, read_index, read_shards, write_index
from diffusion.errors import DataError
from diffusion.files import PARTIAL, publish, sync
from diffusion.preparation.config import DuplicatesConfig
from diffusion.preparation.output_folder import DONE, FACTS, REFUSED, start_over, writing
from diffusion.preparation.partitions.counts import LeftOutExamples, Refusals
from diffusion.preparation.partitions.examine import Examination
from diffusion.preparation.partitions.images import ImageReader
from diffusion.preparation.partitions.merge import (
    BucketOrder,
    KeptIndex,
    LeftOut,
    left_out_as_duplicates,
    numbers_in_folders,
    order_buckets,
)
from diffusion.preparation.partitions.merge_shards import (
    FactsTask,
    ShardTask,
    read_entry,
    remove_facts_beyond,
    shard_tasks_of,
    write_facts,
    write_one_shard,
)
from diffusion.preparation.partitions.output import Summary, read_summary
from diffusion.preparation.partitions.plan import Part, Plan, write_parts
from diffusion.preparation.partitions.small_buckets import leave_small_buckets
from diffusion.preparation.partitions.work import COLUMNS, PartitionTask, places, work_on
from diffusion.preparation.records import Source, clean_text
from diffusion.preparation.withdrawal import KEYS

Call = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]
"""Runs a function over items in the workers; see `engine.started`."""

SHARDS = "shards"
"""Folder below that of a plan: a mark for each finished shard."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Attributes:
        plan: What it does.
        settings: Settings that determine the data.
        sources: The opened sources.
        examination: What is done with each image.
        duplicates: Which images count as the same; None keeps all.
        manifest: Of the data set that is added to; None for a new one.
        earlier: Partitions of that data set.
        out: The data set.
        work: Folder of the plan.
        report: Write the report, too.
        progress: Show bars on stderr.
    """

    plan: Plan
    settings: PrepareSettings
    sources: Sequence[Source]
    examination: Examination
    duplicates: DuplicatesConfig | None
    manifest: PreparedManifest | None
    earlier: list[Part]
    out: Path
    work: Path
    report: bool
    progress: bool

    def complete(self, call: Call) -> PreparedManifest:
        """Do what is left to do.

        Raises:
            DataError: No image was kept.
            MachineError: A source cannot be read, the disk is full, or a worker died.
        """
        summaries = self._examine(call)
        folders = [self._folder(part) for part in self.plan.parts]
        kept = KeptIndex.read(folders)
        if self.manifest is None and not len(kept.rows):
            message = f"no image was kept; {Refusals.of(summaries).in_words()}"
            start_over(self.out, self.work.parent)
            raise DataError(message)
        left_out = self._left_out(kept, folders)
        orders = order_buckets(kept, kept.marked(left_out), self._format)
        self._write_shards(call, kept, folders, orders)
        left_out_examples = self._write_facts(call, kept, folders, orders, left_out)
        return self._finish(summaries, orders, left_out_examples)

    def _left_out(self, kept: KeptIndex, folders: list[Path]) -> list[list[LeftOut]]:
        """Decide which samples are left out of each partition; move those whose bucket is too small."""
        left_out: list[list[LeftOut]] = [[] for _ in folders]
        if self.duplicates is not None:
            earlier = [self.out / FACTS / f"{part.name}.parquet" for part in self.earlier]
            left_out = left_out_as_duplicates(kept, folders, self.duplicates, earlier, self.settings.seed)
        buckets = self.examination.buckets
        if isinstance(buckets, SizeBuckets) and buckets.min_samples:
            existing = self.manifest.splits.get("train", {}) if self.manifest else {}
            more = leave_small_buckets(kept, kept.marked(left_out), folders, buckets, existing)
            left_out = [sorted(found + small) for found, small in zip(left_out, more, strict=True)]
        return left_out

    def _folder(self, part: Part) -> Path:
        return self.work / DONE / part.name

    def _target(self, place: int) -> Path:
        """The MDS folder of a place."""
        split, bucket = places(self.examination.buckets.names)[place]
        return self.out / split / bucket

    def _entry(self, place: int) -> BucketEntry | None:
        """What the data set that is added to holds of a place."""
        split, bucket = places(self.examination.buckets.names)[place]
        return self.manifest.splits.get(split, {}).get(bucket) if self.manifest else None

    @property
    def _format(self) -> ShardFormat:
        return ShardFormat(
            columns=COLUMNS,
            shard_bytes=self.settings.shard_bytes,
            hashes=tuple(self.settings.hashes),
            compression=self.settings.compression,
        )

    def _examine(self, call: Call) -> list[Summary]:
        """Work on the partitions; return their counts in order."""
        with writing(self.out):
            (self.work / DONE).mkdir(exist_ok=True)
        summaries = {
            part.number: read_summary(self._folder(part)) for part in self.plan.parts if self._folder(part).is_dir()
        }
        done = sum(summary.seen for summary in summaries.values())
        expected = [part.partition.num_records for part in self.plan.parts]
        total = None if None in expected else sum(number or 0 for number in expected)
        by_name = {source.name: source for source in self.sources}
        tasks = [
            PartitionTask(
                source=by_name[part.source].only(part.partition),
                part=part,
                folder=self._folder(part),
                out=self.out,
                examination=self.examination,
                validation_fraction=self.settings.validation_fraction,
                seed=self.settings.seed,
                withdrawn=self.out / KEYS,
            )
            for part in self.plan.parts
            if part.number not in summaries
        ]
        with _bar("decoding", total, done, self.progress) as bar:
            for number, summary in call(work_on, tasks):
                summaries[number] = summary
                bar.update(summary.seen)
                bar.set_postfix(refused=sum(one.seen - one.kept for one in summaries.values()), refresh=False)
        return [summaries[part.number] for part in self.plan.parts]

    def _write_shards(
        self,
        call: Call,
        kept: KeptIndex,
        folders: list[Path],
        orders: dict[int, BucketOrder],
    ) -> None:
        """Write the shards that are not written yet."""
        marks = self.work / SHARDS
        tasks = []
        with writing(self.out):
            marks.mkdir(exist_ok=True)
            for place, order in orders.items():
                entry, target = self._entry(place), self._target(place)
                if entry is None and not target.exists():
                    target = target.with_name(target.name + PARTIAL)
                    target.mkdir(parents=True, exist_ok=True)
                for number, samples in shard_tasks_of(order.samples, order.cuts, entry.num_shards if entry else 0):
                    used, sources = np.unique(kept.partition_of(samples), return_inverse=True)
                    tasks.append(
                        ShardTask(
                            out=self.out,
                            folder=target,
                            number=number,
                            partitions=[folders[partition] for partition in used],
                            sources=sources,
                            rows=kept.rows[samples],
                            shards=self._format,
                            mark=marks / f"{place}-{number:06}.json",
                        )
                    )
        with _bar("writing", sum(len(task.rows) for task in tasks), 0, self.progress) as bar:
            for count in call(write_one_shard, tasks):
                bar.update(count)

    def _write_facts(
        self,
        call: Call,
        kept: KeptIndex,
        folders: list[Path],
        orders: dict[int, BucketOrder],
        left_out: list[list[LeftOut]],
    ) -> list[LeftOutExamples]:
        """Write the facts of the partitions; return for each what is left out of it."""
        with writing(self.out):
            for name in (FACTS, REFUSED):
                (self.out / name).mkdir(exist_ok=True)
            remove_facts_beyond(self.out, len(self.earlier) + len(self.plan.parts))
        held = {place: entry.num_samples for place in orders if (entry := self._entry(place))}
        numbers, names = numbers_in_folders(kept, orders, held), places(self.examination.buckets.names)
        tasks = [
            FactsTask(
                out=self.out,
                name=part.name,
                partition=folder,
                numbers=numbers[start:end],
                buckets=[names[place][1] for place in kept.rows["place"][start:end].tolist()],
                left_out=found,
            )
            for part, folder, start, end, found in zip(
                self.plan.parts, folders, kept.starts[:-1], kept.starts[1:], left_out, strict=True
            )
        ]
        examples = dict(call(write_facts, tasks))
        return [examples[part.name] for part in self.plan.parts]

    def _finish(
        self, summaries: list[Summary], orders: dict[int, BucketOrder], left_out: list[LeftOutExamples]
    ) -> PreparedManifest:
        """Write the indexes, and the manifest last."""
        with writing(self.out):
            for name in (FACTS, REFUSED):
                sync(self.out / name)
            for place, order in orders.items():
                self._publish(place, len(order.cuts))
            new = [
                replace(part, content=summary.content, seen=summary.seen, kept=summary.kept - len(found))
                for part, summary, found in zip(self.plan.parts, summaries, left_out, strict=True)
            ]
            parts = [*self.earlier, *new]
            write_parts(self.out, parts)
            refusals = Refusals(self.manifest.refused if self.manifest else None)
            for summary, found in zip(summaries, left_out, strict=True):
                refusals.add(summary)
                refusals.add_left_out(found)
            manifest = self._manifest(parts, new, refusals.entries())
            assert manifest.seen == manifest.kept + sum(one.count for one in manifest.refused.values())
            if self.report:
                self._write_report(parts)
            manifest.write(self.out)
        return manifest

    def _write_report(self, parts: list[Part]) -> None:
        """Write the page and the numbers of the report."""
        from diffusion.preparation.report import write_report  # brings plotting along

        facts = [self.out / FACTS / f"{part.name}.parquet" for part in parts]
        reader = ImageReader(self.out, facts, [self.out / REFUSED / f"{part.name}.parquet" for part in parts])
        write_report(self.out, facts, reader, readable=reader.readable_refused, title=self.out.name)

    def _publish(self, place: int, num_new: int) -> None:
        """Give a new MDS folder its index and its name, or an old one its longer index."""
        entry, target = self._entry(place), self._target(place)
        first = entry.num_shards if entry else 0
        marks = [self.work / SHARDS / f"{place}-{number:06}.json" for number in range(first, first + num_new)]
        entries = [read_entry(mark) for mark in marks]
        if entry is not None:
            write_index(target, [*read_shards(target)[:first], *entries])
        elif not target.exists():
            partial = target.with_name(target.name + PARTIAL)
            write_index(partial, entries)
            publish(partial, target)

    def _manifest(self, parts: list[Part], new: list[Part], refused: dict[str, RefusedEntry]) -> PreparedManifest:
        """Return the manifest of the data set as it is now."""
        seen: Counter[str] = Counter()
        kept: Counter[str] = Counter()
        for part in parts:
            seen[part.source] += part.seen
            kept[part.source] += part.kept
        splits: dict[str, dict[str, BucketEntry]] = {}
        for place, (split, bucket) in enumerate(places(self.examination.buckets.names)):
            if (self._target(place) / INDEX).is_file():
                splits.setdefault(split, {})[bucket] = read_index(self._target(place))
        generation = Generation(
            partitions=len(new), seen=sum(part.seen for part in new), kept=sum(part.kept for part in new)
        )
        return PreparedManifest(
            sources=[
                SourceEntry(
                    name=source.name,
                    kind=source.kind,
                    path=clean_text(source.path),
                    seen=seen[source.name],
                    kept=kept[source.name],
                )
                for source in self.sources
            ],
            settings=self.settings,
            columns=COLUMNS,
            seen=seen.total(),
            kept=kept.total(),
            refused=refused,
            splits=splits,
            generations=[*(self.manifest.generations if self.manifest else []), generation],
        )


def _bar(what: str, total: int | None, done: int, progress: bool) -> tqdm:
    """Return a progress bar; where stderr is a file it adds a line now and then only."""
    interval = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(desc=what, total=total, initial=done, unit=" images", mininterval=interval, disable=not progress)
