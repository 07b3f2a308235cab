"""Counts of refused images over partitions and generations."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from diffusion.datasets.manifest import Example, RefusedEntry
from diffusion.preparation.partitions.output import NUM_EXAMPLES, Summary

LeftOutExamples = Sequence[tuple[str, str, str]]
"""Reason, key and detail of each sample of a partition that is left out afterwards."""


class Refusals:
    """Refused images by reason, with the first few of each in the order in which partitions are added."""

    def __init__(self, earlier: Mapping[str, RefusedEntry] | None = None) -> None:
        earlier = earlier or {}
        self._counts = Counter({reason: entry.count for reason, entry in earlier.items()})
        self._examples = {reason: list(entry.examples) for reason, entry in earlier.items()}

    @classmethod
    def of(cls, summaries: Iterable[Summary]) -> "Refusals":
        """Add up partitions."""
        refusals = cls()
        for summary in summaries:
            refusals.add(summary)
        return refusals

    def add(self, summary: Summary) -> None:
        """Add what was refused while a partition was read."""
        self._counts.update(summary.refused)
        for reason, examples in summary.examples.items():
            self._show(reason, examples)

    def add_left_out(self, left_out: LeftOutExamples) -> None:
        """Add what was left out of a partition afterwards."""
        for reason, key, detail in left_out:
            self._counts[reason] += 1
            self._show(reason, [(key, detail)])

    def entries(self) -> dict[str, RefusedEntry]:
        """Return the refusals for the manifest, sorted by reason."""
        return {
            reason: RefusedEntry(count=self._counts[reason], examples=self._examples[reason])
            for reason in sorted(self._counts)
        }

    def in_words(self) -> str:
        """Return the refusals in words, with an example of each reason."""
        reasons = [
            f"{entry.count} refused as {reason} (as {entry.examples[0].key}: {entry.examples[0].detail or reason})"
            for reason, entry in self.entries().items()
        ]
        return "; ".join(reasons) or "the sources hold none"

    def _show(self, reason: str, examples: Iterable[tuple[str, str]]) -> None:
        shown = self._examples.setdefault(reason, [])
        shown += [Example(key=key, detail=detail) for key, detail in examples][: max(NUM_EXAMPLES - len(shown), 0)]
