"""Callbacks of the verified runs, named in their plug-ins: what was drawn, and disturbances from within.

Each rank writes a line per step, with the digest of every sample that it trained on. Sorted by sample over all ranks,
the lines of a step give one hash, which does not depend on ranks and microbatches.
"""

import hashlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from composer import Callback, Event, Logger, State
from torch import Tensor

from diffusion.distributed import rank, world_size
from diffusion.files import read_json_lines
from diffusion.models.latent_diffusion import Draws, Prediction


class ImageDraws(NamedTuple):
    """What the VAE's training drew for a microbatch: addresses [B], and images uint8 [B, 3, height, width]."""

    sample: Tensor
    step: Tensor
    image: Tensor


class DrawTrace(Callback):
    """Writes what the model drew while training to `folder/rank-R.jsonl`."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._draws: list[Draws | ImageDraws] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def after_forward(self, state: State, logger: Logger) -> None:
        """Take what the model drew for a microbatch."""
        if isinstance(state.outputs, Prediction):
            self._draws.append(state.outputs.draws)
        else:  # A VAE draws by step and sample only.
            self._draws.append(ImageDraws(*(state.batch[name] for name in ImageDraws._fields)))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the line of a step."""
        digests = [pair for draws in self._draws for pair in sample_digests(draws)]
        row = {
            "step": state.timestamp.batch.value - 1,
            "world_size": world_size(),
            "samples": [sample for sample, _ in digests],
            "digests": [digest for _, digest in digests],
        }
        self._draws.clear()
        with (self.folder / f"rank-{rank()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def sample_digests(draws: Draws | ImageDraws) -> list[tuple[int, str]]:
    """Address of each sample and a digest of its random numbers and conditioning."""
    parts = [tensor.detach().cpu().contiguous().numpy() for tensor in draws if tensor is not None]
    result = []
    for i in range(len(draws.sample)):
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part[i].tobytes())
        result.append((int(draws.sample[i]), digest.hexdigest()[:16]))
    return result


def step_hashes(folder: Path) -> dict[int, str]:
    """Read the hash of each step from the folder of `DrawTrace`; a repeated step counts as it was run last."""
    rows: dict[int, dict[int, dict]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for row in read_json_lines(path):
            if row is not None:  # Else the process was killed while it wrote.
                rows.setdefault(row["step"], {})[rank] = row
    return {step: _hash(ranks) for step, ranks in sorted(rows.items()) if 0 in ranks}


def _hash(ranks: Mapping[int, dict]) -> str:
    """Rank 0's line is of the last start that ran the step, and holds its number of ranks."""
    world_size = ranks[0]["world_size"]
    pairs = sorted(
        (sample, digest)
        for rank, row in ranks.items()
        if rank < world_size
        for sample, digest in zip(row["samples"], row["digests"], strict=True)
    )
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]


MOMENTS = ("before_forward", "after_backward", "batch_end")
"""Events of Composer at which a run can be disturbed: in a step before and after its gradients, and after it."""


class Disturbance(Callback):
    """Disturbs one step, numbered from 0, at one of `MOMENTS`.

    `kill`: the last rank ends by SIGKILL, like a lost machine. `term`: each rank gets SIGTERM, as from schedulers.
    """

    def __init__(self, step: int, moment: str, kind: str) -> None:
        self.step, self.event, self.kind = step, Event(moment), kind
        self.is_done = False

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Send the signal at the event of the step."""
        done = int(state.timestamp.batch) - (1 if event is Event.BATCH_END else 0)
        if self.is_done or event is not self.event or done != self.step:
            return
        self.is_done = True  # Microbatches repeat events.
        if self.kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        elif rank() == world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
