"""What was drawn for each sample of each step, as digests that do not know the world.

Each rank writes a line per step, with the digest of every sample that it trained on. Sorted by sample over all ranks,
the lines of a step give one hash, whatever the ranks and microbatches were.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.models.latent_diffusion import Draws, LatentDiffusion


class DrawTrace(Callback):
    """Write what the model drew while training to `folder/rank-R.jsonl`; named in a YAML as a plug-in.

    Args:
        folder: where the lines go.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._draws: list[Draws] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        """Observe the model."""
        model = getattr(state.model, "module", state.model)
        assert isinstance(model, LatentDiffusion)
        model.observer = self._draws.append
        self.folder.mkdir(parents=True, exist_ok=True)

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the line of a step."""
        digests = [pair for draws in self._draws for pair in sample_digests(draws)]
        row = {
            "step": state.timestamp.batch.value - 1,
            "world_size": dist.get_world_size(),
            "samples": [sample for sample, _ in digests],
            "digests": [digest for _, digest in digests],
        }
        self._draws.clear()
        with (self.folder / f"rank-{dist.get_global_rank()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def sample_digests(draws: Draws) -> list[tuple[int, str]]:
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
    """One hash for each step over the lines of all ranks; a step that was run again counts as it was run last.

    Args:
        folder: where `DrawTrace` wrote; ranks of several incarnations of a run append to the same files.

    Returns:
        Hashes by step.
    """
    rows: dict[int, dict[int, dict]] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # The process was killed while it wrote.
            rows.setdefault(row["step"], {})[rank] = row
    return {step: _hash(ranks) for step, ranks in sorted(rows.items()) if 0 in ranks}


def _hash(ranks: Mapping[int, dict]) -> str:
    """Rank 0's line is of the last incarnation that ran the step, and says how many ranks' lines belong to it."""
    world_size = ranks[0]["world_size"]
    pairs = sorted(
        (sample, digest)
        for rank, row in ranks.items()
        if rank < world_size
        for sample, digest in zip(row["samples"], row["digests"], strict=True)
    )
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:16]
