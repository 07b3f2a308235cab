"""Data sets, callbacks and weights for tests of training; YAMLs name them by import path."""

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor, nn
from torchvision.models import vgg16

from diffusion.ema.averaging import full_tensor, local_shard, trainable_parameters
from diffusion.ema.callbacks import LateStartEMA
from diffusion.models.architectures import with_seed

NUM_SAMPLES = 64


class ToyLatents(torch.utils.data.Dataset):
    """Random latents with learnable structure: each caption has a latent of its own."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index % 8)
        token_ids = torch.zeros(24, dtype=torch.int64)
        token_ids[1] = 1 + index % 8
        return {
            "latent_mean": torch.randn(4, 8, 8, generator=generator).half(),
            "latent_logvar": torch.full((4, 8, 8), -8.0).half(),
            "token_ids": token_ids,
            "sample": torch.tensor(index),
            "scores": torch.tensor([float(index % 8)]),
        }


class RecordWeights(Callback):
    """Write the weights after each step to `folder/step-N.pt`, on rank 0."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def batch_end(self, state: State, logger: Logger) -> None:
        weights = {name: full_tensor(p.detach()).clone() for name, p in trainable_parameters(state.model).items()}
        if dist.get_global_rank() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, self.folder / f"step-{state.timestamp.batch.value:03d}.pt")


class RecordBatches(Callback):
    """Write sample addresses and steps of each global batch to `folder/rank-R.txt`."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / f"rank-{dist.get_global_rank()}.txt"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def batch_start(self, state: State, logger: Logger) -> None:
        samples = state.batch["sample"].tolist()
        with self.path.open("a") as file:
            file.write(f"{state.timestamp.batch.value} {' '.join(map(str, samples))}\n")


class SignalAt(Callback):
    """Send a signal to a rank at the beginning of a step: 9 kills it."""

    def __init__(self, step: int, number: int, rank: int = 0) -> None:
        self.step, self.number, self.rank = step, number, rank

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == self.rank:
            os.kill(os.getpid(), self.number)


class StallWorkers(Callback):
    """Let the loader workers of rank 0 sleep when a step begins: no batch comes any more."""

    def __init__(self, step: int) -> None:
        self.step = step
        signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(600))  # The workers inherit it.

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == 0:
            for worker in multiprocessing.active_children():
                os.kill(cast("int", worker.pid), signal.SIGALRM)


class DisturbHost(Callback):
    """Let something happen to a host when a step begins, once.

    Args:
        step: number of the step.
        host: name of the host.
        what: `rank`: its last rank gets a signal; `agent`: torchrun's agent does, and its ranks do not; `all`: both do;
            `cable`: nothing comes or goes any more, and no connection is closed.
        number: the signal.
    """

    def __init__(self, step: int, host: str, what: str, number: int = signal.SIGKILL) -> None:
        self.step, self.host, self.what, self.number = step, host, what, number

    def batch_start(self, state: State, logger: Logger) -> None:
        is_last = int(os.environ["LOCAL_RANK"]) == int(os.environ["LOCAL_WORLD_SIZE"]) - 1
        is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        is_time = state.timestamp.batch.value == self.step and os.environ["HOST"] == self.host
        if not (is_time and is_last and is_first_start):
            return
        if self.what == "cable":
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        elif self.what == "all":
            os.killpg(0, self.number)
        elif self.what == "rank":
            os.kill(os.getpid(), self.number)
        else:
            agent = psutil.Process(os.getppid())
            agent.send_signal(self.number)
            if self.number == signal.SIGKILL:
                agent.wait()


class LimitFileSize(Callback):
    """Let every write beyond so many bytes of a file fail from a step on, as on a full disk."""

    def __init__(self, step: int, num_bytes: int, rank: int = 0) -> None:
        self.step, self.num_bytes, self.rank = step, num_bytes, rank

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == self.rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, resource.RLIM_INFINITY))


class Announce(Callback):
    """Create a file when a step begins, so that a test knows where a run is."""

    def __init__(self, step: int, path: str) -> None:
        self.step, self.path = step, Path(path)

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == 0:
            self.path.touch()


class RecordGradients(Callback):
    """Write the gradients of the first step to a file, on rank 0."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 0:
            named = trainable_parameters(state.model).items()
            gradients = {name: full_tensor(p.grad).clone() for name, p in named if p.grad is not None}
            if dist.get_global_rank() == 0:
                torch.save(gradients, self.path)


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """Hash of this rank's shards."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(local_shard(tensor.detach()).contiguous().numpy().tobytes())
    return digest.hexdigest()


class RecordAverages(Callback):
    """Write to `folder/rank-R.jsonl` what the averages take, and which weights are in place when."""

    def __init__(self, folder: str) -> None:
        self.path = Path(folder) / f"rank-{dist.get_global_rank()}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def _write(self, event: str, state: State, **values: Any) -> None:
        weights = fingerprint(trainable_parameters(state.model).values())
        row = {"event": event, "step": state.timestamp.batch.value, "weights": weights, **values}
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def batch_start(self, state: State, logger: Logger) -> None:
        self._write("batch_start", state)

    def eval_start(self, state: State, logger: Logger) -> None:
        self._write("eval_start", state)

    def batch_end(self, state: State, logger: Logger) -> None:
        (ema,) = (callback for callback in state.callbacks if isinstance(callback, LateStartEMA))
        averages = [average.averages for average in ema.averages]
        shards = [local_shard(tensor) for tensors in averages for tensor in tensors.values()]
        storages = {shard.untyped_storage().data_ptr(): shard.untyped_storage().nbytes() for shard in shards}
        self._write(
            "batch_end",
            state,
            num_averages=len(averages),
            num_bytes=sum(storages.values()),
            num_elements=sum(local_shard(p).numel() for p in trainable_parameters(state.model).values()),
            average=fingerprint(averages[0].values()) if averages else None,
        )


API_KEY = "planted-1-config"


class Secretive(Callback):
    """Takes arguments that are nobody else's business."""

    def __init__(self, api_key: str, url: str, note: str) -> None:
        assert api_key == API_KEY, "the callback gets what the configuration says"


def write_vgg(path: Path) -> nn.Sequential:
    """Save the weights as torchvision's file has them, without the classifier; return the layers."""
    features = with_seed(0, lambda: vgg16(weights=None, init_weights=False).features)
    assert isinstance(features, nn.Sequential)
    torch.save({f"features.{name}": tensor for name, tensor in features.state_dict().items()}, path)
    return features
