"""Records of a run beside its checkpoints, for a start with another run folder: rollbacks and costs."""

import logging
import tempfile
from dataclasses import asdict
from pathlib import Path

from diffusion import storage
from diffusion.errors import UserError, explained_writes
from diffusion.files import append_json_lines
from diffusion.formats.run_folder import COSTS, ROLLBACK, ROLLBACKS, read_request, read_rollbacks, request_rollback
from diffusion.operations.costs import CostsFile, read_costs

log = logging.getLogger(__name__)

RECORDS = "records.json"
"""Contents of the files, by name."""

_FILES = (ROLLBACK, ROLLBACKS, COSTS)


def keep_records(run: Path, folder: str | None) -> None:
    """Copy the records of a run folder to `trainer.checkpoint_folder`, if there is one; a failure is only logged."""
    if folder is None:
        return
    try:
        files = {name: (run / name).read_text() for name in _FILES if (run / name).is_file()}
        storage.write_json(storage.join(folder, RECORDS), files)
    except (OSError, UserError) as error:
        log.warning("rollbacks and costs are not recorded in %s: %s", storage.shown(folder), error)


def fetch_records(run: Path, folder: str | None) -> None:
    """Add what `keep_records` has copied from other run folders to this one, which has the newest of its own starts.

    Raises:
        DataError: the records are damaged.
        MachineError: they cannot be read, or the run folder cannot be written to.
    """
    if folder is None:
        return
    files = storage.read_json(storage.join(folder, RECORDS), default={})
    with explained_writes(run), tempfile.TemporaryDirectory() as temporary:
        for name in _FILES:
            if name in files:
                Path(temporary, name).write_text(files[name])
        others = Path(temporary)
        request, rollbacks, known = read_request(others), read_rollbacks(others), read_rollbacks(run)
        append_json_lines(run / ROLLBACKS, [asdict(rollback) for rollback in rollbacks if rollback not in known])
        if request is not None and request not in known:
            request_rollback(run, request)
        elif read_request(run) in rollbacks:
            (run / ROLLBACK).unlink()
        known_starts = {start.began for start in read_costs(run)}
        for start in read_costs(others):
            if start.began not in known_starts:
                file = CostsFile(run)
                file.write(start)
                file.close()
