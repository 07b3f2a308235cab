"""What checkpoints cost: bytes, the time for which a step waits, and the first batch after a resumption."""

import os
import shutil
import signal
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from composer import Callback, Logger, State
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

from diffusion.checkpointing.layout import list_checkpoints
from diffusion.checkpointing.save import HostCopy
from diffusion.config.loading import load_config
from diffusion.datasets.loader import train_loader
from diffusion.formats.run_folder import STALL, TRAIN_LOSS, read_metrics, series
from diffusion.models.architectures import build_network
from tests.tools.runs import assert_equal, state_of
from tests.tools.s3_server import s3_process, s3_server
from tests.tools.written_data import tokenize, write_encoded

pytestmark = pytest.mark.slow

__all__ = ["s3_process", "s3_server"]

UNET = (
    "model.network={block_out_channels: [160, 320], norm_num_groups: 32, attention_head_dim: [2, 4], "
    "down_block_types: [CrossAttnDownBlock2D, CrossAttnDownBlock2D], "
    "up_block_types: [CrossAttnUpBlock2D, CrossAttnUpBlock2D]}"
)
"""26 million parameters: of an entry, 1.6 kB are not its tensor, which tiny models consist of."""

EPOCH = 20_000
MAX_RATIO = 1.5


# Bytes


@pytest.mark.world_size(2)
def test_bytes_of_a_checkpoint_before_and_after_the_start_of_the_average(server, tmp_path):
    run = tmp_path / "run"
    overrides = [
        UNET,
        f"output_folder={run}",
        "data.global_batch_size=2",
        "trainer.max_duration=3ba",
        "trainer.save_interval=1ba",
        "algorithms.ema.start=2ba",
    ]
    server.train(2, [("tests/tools/toy.yaml", overrides)])
    with torch.device("meta"):
        unet = build_network(load_config("tests/tools/toy.yaml", [UNET]).model)
    num_parameters = sum(parameter.numel() for parameter in unet.parameters())
    sizes = [sum(file.stat().st_size for file in path.iterdir()) for path in list_checkpoints(run / "checkpoints")]
    before, after = sizes[0], sizes[-1]
    shutil.rmtree(run)
    assert len(sizes) == 3
    assert 1 < before / (num_parameters * (4 + 8)) <= 1.02
    assert 1 < after / (num_parameters * (4 + 8 + 4)) <= 1.02


# In the background


class ThawServerAt(Callback):
    """Let a frozen server go on when a step begins, on rank 0, and freeze it when another one does."""

    def __init__(self, freeze: int, thaw: int, pid: int) -> None:
        self.signals = {freeze: signal.SIGSTOP, thaw: signal.SIGCONT}
        self.pid = pid

    def batch_start(self, state: State, logger: Logger) -> None:
        number = self.signals.get(state.timestamp.batch.value)
        if number is not None and dist.get_rank() == 0:
            os.kill(self.pid, number)


@pytest.mark.s3
@pytest.mark.world_size(2)
def test_training_goes_on_while_a_checkpoint_is_uploaded(server, s3_server, tmp_path):
    run, reference = tmp_path / "run", tmp_path / "reference"
    arguments = f"{{freeze: 3, thaw: 7, pid: {s3_server.pid}}}"
    thaw = f"{{path: tests.integration.test_checkpoint_cost.ThawServerAt, arguments: {arguments}}}"
    common = ["trainer.save_interval=4ba", "trainer.max_duration=8ba"]
    overrides = [
        f"output_folder={run}",
        "trainer.checkpoint_folder=s3://tests/uploaded",
        "trainer.async_checkpoints=true",
        f"plugins.callbacks=[{thaw}]",
        *common,
    ]
    # With the server frozen from step 3 to step 7, a save at step 4 that waited would keep step 7 from coming.
    server.train(
        2, [("tests/tools/toy.yaml", overrides), ("tests/tools/toy.yaml", [f"output_folder={reference}", *common])]
    )
    rows = read_metrics(run / "metrics.jsonl")
    assert series(rows, TRAIN_LOSS)[0] == list(range(8))
    assert series(rows, STALL)[0] == [4, 8]
    assert all(seconds > 0 for seconds in series(rows, STALL)[1])

    stored = tmp_path / "stored" / "ep0-ba4"
    stored.mkdir(parents=True)
    for file in s3_server.path("s3://tests/uploaded/ep0-ba4").glob("*._S3rver_object"):
        shutil.copy(file, stored / file.name.removesuffix("._S3rver_object"))
    state = state_of(reference / "checkpoints" / "ep0-ba4")
    assert any("LateStartEMA" in name for name in state)
    assert_equal(state, state_of(stored))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_copy_of_the_state_does_not_follow_it(group):
    mesh = init_device_mesh("cpu", (1,))
    state: dict[str, Any] = {
        "plain": torch.arange(4.0, requires_grad=True),
        "view": torch.arange(8.0)[::2],
        "sharded": DTensor.from_local(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)]),
        "nested": [{"steps": [1, 2]}, (torch.ones(2), "text", None)],
    }
    copy = HostCopy().update(state)
    with torch.no_grad():
        state["plain"].zero_()
        state["view"].zero_()
        state["sharded"].to_local().zero_()
        state["nested"][1][0].zero_()
    state["nested"][0]["steps"].append(3)
    assert copy["plain"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not copy["plain"].requires_grad
    assert copy["view"].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert isinstance(copy["sharded"], DTensor)
    assert copy["sharded"].placements == (Shard(0),)
    assert copy["sharded"].to_local().flatten().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert copy["nested"][0] == {"steps": [1, 2]}
    assert copy["nested"][1][0].tolist() == [1.0, 1.0]
    assert copy["nested"][1][1:] == ("text", None)


def test_the_next_copy_takes_the_same_memory(group):
    mesh = init_device_mesh("cpu", (1,))
    sharded = DTensor.from_local(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    state: dict[str, Any] = {"weights": [torch.ones(4), sharded], "step": torch.tensor(1.0)}
    host = HostCopy()

    def addresses(copy: dict[str, Any]) -> list[int]:
        plain, part = copy["weights"][:2]
        return [plain.data_ptr(), part.to_local().data_ptr(), copy["step"].data_ptr()]

    before = addresses(host.update(state))
    state["weights"][0] += 1
    sharded.to_local().mul_(2)
    state["weights"].append(torch.zeros(3))  # As an average that starts.
    copy = host.update(state)
    assert addresses(copy) == before
    assert copy["weights"][0].tolist() == [2.0] * 4
    assert copy["weights"][1].to_local().flatten().tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert copy["weights"][2].tolist() == [0.0] * 3
    state["step"] = torch.tensor([1, 2])
    assert host.update(state)["step"].tolist() == [1, 2], "memory of another shape does not serve"


@pytest.mark.gpu
def test_the_copy_of_a_gpu_is_in_pinned_memory():
    weights = torch.arange(2**20, dtype=torch.float32, device="cuda")
    host = HostCopy()
    copy = host.update({"weights": weights})["weights"]
    assert copy.is_pinned()
    assert torch.equal(copy, torch.arange(2**20, dtype=torch.float32))
    assert host.update({"weights": weights.mul_(2)})["weights"] is copy
    assert torch.equal(copy, 2 * torch.arange(2**20, dtype=torch.float32))


# The first batch


def first_batch_seconds(local: Path, start: int | None) -> float:
    """CPU seconds from nothing to the first batch: at the beginning of an epoch, or at a sample in it."""
    config = load_config("tests/tools/toy.yaml", [f"data.local={local}", "data.streams=[{name: a}, {name: b}]"]).data
    config.global_batch_size = 32
    begin = time.process_time()
    loader = train_loader(config, seed=17, tokenize=tokenize)
    dataset: Any = loader.dataset
    if start is not None:
        position = dataset.state_dict(num_samples=0, from_beginning=False)
        dataset.load_state_dict(position | {"epoch": 0, "sample_in_epoch": start})
    batch = next(iter(loader))
    seconds = time.process_time() - begin
    dataset.close()  # Its threads would go on beside the next one.
    assert len(batch["sample"]) == 32
    return seconds


def test_the_first_batch_after_a_resumption_takes_hardly_longer_than_at_a_cold_start(tmp_path):
    local = write_encoded(tmp_path, {"a": EPOCH // 2, "b": EPOCH // 2})
    middle = EPOCH // 2 // 32 * 32
    for start in (None, middle):
        first_batch_seconds(local, start)  # The first data set of a process has less to look through.
    cold, resumed = [], []
    for _ in range(12):
        cold.append(first_batch_seconds(local, None))
        resumed.append(first_batch_seconds(local, middle))
        if len(cold) >= 3 and median(resumed) <= MAX_RATIO * median(cold):
            break
    assert median(resumed) <= MAX_RATIO * median(cold), (cold, resumed)
