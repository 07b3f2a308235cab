"""Global batches in real processes of several ranks, with and without loader workers, from the middle of an epoch."""

import json
import os
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

from diffusion.config.data import Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import train_loader
from tests.tools.written_data import data_config, write_encoded

pytestmark = pytest.mark.slow

RANK_PROGRAM = """
import atexit, json, os, sys
from pathlib import Path
import torch.distributed as dist
rank, world, root, work = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
dist.init_process_group("gloo", init_method=f"file://{work}/store", rank=rank, world_size=world)
from tests.tools.written_data import data_config
from diffusion.config.data import Representation
from diffusion.datasets.batch import BatchKey
from diffusion.datasets.loader import train_loader
runs = []
size = int(sys.argv[5])
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
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # The interpreter's exit can abort while a gloo group is there.
"""


def run_world(world: int, root: Path, work: Path, size: int) -> list[tuple[int, list[list[list[int]]]]]:
    """Read two epochs in real processes: once from the fourth batch of the first epoch on, once from the beginning.

    Returns:
        For both: batches that the loader announces; the samples of each global batch, sorted, by epoch.
    """
    work.mkdir()
    processes = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
            "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", RANK_PROGRAM, str(rank), str(world), str(root), str(work), str(size)]
        with (work / f"log{rank}").open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, stderr=log))
    began = time.monotonic()
    while any(process.poll() is None for process in processes) and time.monotonic() - began < 600:
        if any(process.poll() for process in processes):
            break
        time.sleep(0.1)
    codes = [process.poll() for process in processes]
    for process in processes:
        process.kill()
        process.wait()
    assert codes == [0] * world, "\n".join((work / f"log{rank}").read_text() for rank in range(world))
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
@pytest.mark.parametrize(("world", "size"), [(2, 8), (3, 12)])  # of four canonical nodes
def test_global_batches_do_not_depend_on_the_world_size_or_a_resumption(tmp_path: Path, world: int, size: int) -> None:
    root = write_encoded(tmp_path, {"a": 30, "b": 40})
    config = data_config(root, "a", "b", representation=Representation.latents, global_batch_size=size)
    loader = train_loader(config, seed=3, tokenize=None)
    alone = [[sorted(batch[BatchKey.SAMPLE].tolist()) for batch in loader] for _ in range(2)]
    (_, resumed), (length, together) = run_world(world, root, tmp_path / "ranks", size)
    assert length == len(loader) == len(alone[0])
    assert together == alone
    assert resumed == [alone[0][3:], alone[1]]
