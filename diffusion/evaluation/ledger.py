"""Which checkpoints of a run a watcher has seen to: a file that survives it."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from diffusion.errors import DataError
from diffusion.files import read_json, write_json

LEDGER = "ledger.json"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A checkpoint that has been seen to."""

    step: int
    skipped: str | None = None
    """Why it was not evaluated; None if it was."""

    is_last: bool = False
    """Whether it is of the last step that the run's configuration asks for."""


@dataclass(kw_only=True)
class Ledger:
    """Checkpoints by their names (`ep0-ba100`).

    Args:
        path: the file, which is replaced at each change.
        run: the run that is followed.
    """

    path: Path
    run: str
    entries: dict[str, Entry] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, run: str) -> "Ledger":
        """Read the ledger of an output folder, or begin one.

        Raises:
            DataError: it is damaged, or of another run.
        """
        ledger = cls(path=folder / LEDGER, run=run)
        if not ledger.path.is_file():
            return ledger
        content = read_json(ledger.path)
        try:
            known, entries = content["run"], {name: Entry(**entry) for name, entry in content["checkpoints"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{ledger.path} is not the ledger of a watcher: {error!r}") from error
        if known != run:
            raise DataError(f"{ledger.path} is of the run {known}, not of {run}: choose another output_folder")
        return cls(path=ledger.path, run=run, entries=entries)

    def add(self, name: str, entry: Entry) -> None:
        """Note a checkpoint, and write the file."""
        self.entries[name] = entry
        content = {name: asdict(entry) for name, entry in self.entries.items()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"run": self.run, "checkpoints": content})
