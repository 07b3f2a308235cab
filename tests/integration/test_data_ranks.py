"""Global batches in real processes of several ranks, with and without loader workers, from the middle of an epoch."""

import json
from itertools import chain
from pathlib import Path

import pytest

from diffusion.config.data import Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import train_loader
from tests.tools.training_runs import TrainingServer
from tests.tools.written_data import data_config, write_encoded

pytestmark = pytest.mark.slow

RANK_PROGRAM = """
import json, sys
from pathlib import Path
import torch.distributed as dist
root, work, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method="env://")
rank, world = dist.get_rank(), dist.get_world_size()
from tests.tools.written_data import data_config
from diffusion.config.data import Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import train_loader
runs = []
for start, num_workers in [(3 * size, 0), (0, 2)]:
    config = data_config(
        root, "a", "b", representation=Representation.latents, num_workers=num_workers, global_batch_size=size
    )
    loader = train_loader(config, seed=3, tokenize=None)
    if start:
        state = loader.dataset.state_dict(0, from_beginning=True)
        loader.dataset.load_state_dict(state | {"epoch": 0, "sample_in_epoch": start})
    runs.append([len(loader), [[batch[BatchKey.SAMPLE].tolist() for batch in loader] for _ in range(2)]])
Path(work, f"rank{rank}.json").write_text(json.dumps(runs))
dist.barrier()
"""


def run_world(
    server: TrainingServer, world: int, root: Path, work: Path, size: int
) -> list[tuple[int, list[list[list[int]]]]]:
    """Read two epochs in real processes: once from the fourth batch of the first epoch on, once from the beginning.

    Returns:
        For both: batches that the loader announces; the samples of each global batch, sorted, by epoch.
    """
    work.mkdir()
    program = work / "ranks.py"
    program.write_text(RANK_PROGRAM)
    server.command(world, [str(program), str(root), str(work), str(size)])
    ranks = [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(world)]
    merged = []
    for runs in zip(*ranks, strict=True):
        assert len({length for length, _ in runs}) == 1
        epochs = [
            [sorted(chain.from_iterable(batches)) for batches in zip(*epoch, strict=True)]
            for epoch in zip(*(epochs for _, epochs in runs), strict=True)
        ]
        merged.append((runs[0][0], epochs))
    return merged


@pytest.mark.world_size(3)
def test_global_batches_do_not_depend_on_the_world_size_or_a_resumption(server: TrainingServer, tmp_path: Path) -> None:
    """Three ranks share four canonical nodes."""
    size = 12
    root = write_encoded(tmp_path, {"a": 30, "b": 40})
    config = data_config(root, "a", "b", representation=Representation.latents, global_batch_size=size)
    loader = train_loader(config, seed=3, tokenize=None)
    alone = [[sorted(batch[BatchKey.SAMPLE].tolist()) for batch in loader] for _ in range(2)]
    (_, resumed), (length, together) = run_world(server, 3, root, tmp_path / "ranks", size)
    assert length == len(loader) == len(alone[0])
    assert together == alone
    assert resumed == [alone[0][3:], alone[1]]
