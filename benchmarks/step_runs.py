"""Three ways to make the same training step, from the same configuration: the bare U-Net, a plain loop, the Trainer.

The data are latents and captions that lie in memory. Shape letters: B batch, C channels, H W side of the latent, L
tokens, D text width.
"""

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from composer import ComposerModel, Trainer
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from diffusion.callbacks.metrics_file import read_metrics
from diffusion.callbacks.saving import STALL
from diffusion.config.loading import load_config
from diffusion.config.model import Architecture
from diffusion.config.schema import Config
from diffusion.config.training import Device, Precision
from diffusion.datasets.batch import BatchKey
from diffusion.models import fast
from diffusion.models.architectures import ARCHITECTURES
from diffusion.models.build import build_model
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.operations.checks.nodes import synchronize

NUM_SAMPLES = 4096


class ResidentLatents(Dataset):
    """Random latents and token ids that are drawn once.

    Args:
        architecture: whose latents.
        resolution: side of the images in pixels.
        num_samples: of an epoch; 64 different ones repeat.
    """

    def __init__(self, architecture: str, resolution: int, num_samples: int = NUM_SAMPLES) -> None:
        spec = ARCHITECTURES[Architecture(architecture)]
        side, generator = resolution // spec.vae_factor, torch.Generator().manual_seed(0)
        shape = (64, spec.vae["latent_channels"], side, side)
        self.num_samples = num_samples
        self.means = torch.randn(shape, generator=generator).half()
        self.logvar = torch.full(shape[1:], -8.0).half()
        self.token_ids = torch.randint(spec.text_encoder["vocab_size"], (64, spec.max_tokens), generator=generator)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            BatchKey.LATENT_MEAN.value: self.means[index % 64],
            BatchKey.LATENT_LOGVAR.value: self.logvar,
            BatchKey.TOKEN_IDS.value: self.token_ids[index % 64],
            BatchKey.SAMPLE.value: torch.tensor(index),
        }


def run_config(
    folder: Path,
    architecture: Architecture,
    *,
    resolution: int,
    batch_size: int,
    num_steps: int,
    overrides: Sequence[str] = (),
    callbacks: Sequence[tuple[str, dict[str, Any]]] = (),
) -> Config:
    """The configuration of a run of so many steps on resident data, without evaluation, checkpoints and samples.

    Args:
        folder: for the run.
        architecture: of the model, with random weights.
        resolution: side of the images.
        batch_size: global.
        num_steps: length.
        overrides: `key.sub=value`.
        callbacks: import paths and arguments.
    """
    settings = {
        "run_name": "benchmark",
        "output_folder": str(folder / "run"),
        "model": {"architecture": architecture.value},
        "data": {
            "representation": "latents",
            "resolution": resolution,
            "global_batch_size": batch_size,
            "num_workers": 0,
        },
        "schedule": {"warmup": "0ba"},
        "trainer": {
            "max_duration": f"{num_steps}ba",
            "save_interval": f"{10 * num_steps}ba",
            "progress_bar": False,
        },
        "plugins": {
            "train_dataset": {
                "path": f"{__name__}.ResidentLatents",
                "arguments": {"architecture": architecture.value, "resolution": resolution},
            },
            "callbacks": [{"path": path, "arguments": arguments} for path, arguments in callbacks],
        },
    }
    path = folder / f"run-{dist.get_global_rank()}.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML.
    return load_config(path, overrides)


class BareStep:
    """Forward pass, loss, backward pass and AdamW of the U-Net on one batch that lies ready.

    Args:
        config: Of the run.
        device: Where.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.unet: Any = build_on(config, device).unet.train()
        self.autocast = _autocast(config, device)
        self.optimizer = _optimizer(config, self.unet)
        batch = _batch(config, device)
        size, spec = config.data.global_batch_size, ARCHITECTURES[config.model.architecture]
        generator = torch.Generator().manual_seed(1)
        self.latents = batch[BatchKey.LATENT_MEAN].float()
        self.target = torch.randn(self.latents.shape, generator=generator).to(device)
        width = {**spec.unet, **config.model.unet}["cross_attention_dim"]
        self.text = torch.randn(size, spec.max_tokens, width, generator=generator).to(device)
        self.timesteps = torch.randint(1000, (size,), generator=generator).to(device)

    def __call__(self) -> Tensor:
        """Make a step; the loss float32 []."""
        with self.autocast():
            prediction = self.unet(self.latents, self.timesteps, self.text, return_dict=False)[0]
        loss = F.mse_loss(prediction.float(), self.target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class ObjectiveStep:
    """A step with the project's own draws, from other samples each time: for losses, not for speed.

    Args:
        config: Of the run; `trainer.device_train_microbatch_size` splits its batches.
        device: Where.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.model = build_on(config, device).train()
        self.autocast = _autocast(config, device)
        self.optimizer = _optimizer(config, self.model.unet)
        self.data = ResidentLatents(config.model.architecture.value, config.data.resolution)
        self.size, self.device, self.num_steps = config.data.global_batch_size, device, 0
        self.microbatch_size = config.trainer.device_train_microbatch_size or self.size

    def __call__(self) -> Tensor:
        """Make a step; the mean loss over its microbatches, float32 []."""
        first = self.num_steps * self.size
        starts = range(first, first + self.size, self.microbatch_size)
        losses = [self._accumulate(start) / len(starts) for start in starts]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1
        return torch.stack(losses).sum()

    def _accumulate(self, start: int) -> Tensor:
        """Add the gradients of the microbatch from a sample on; its loss."""
        samples = [self.data[start + i] for i in range(self.microbatch_size)]
        batch = {key: value.to(self.device) for key, value in default_collate(samples).items()}
        batch[BatchKey.STEP.value] = torch.full_like(batch[BatchKey.SAMPLE.value], self.num_steps)
        with self.autocast():
            outputs = self.model(batch)
        loss = self.model.loss(outputs, batch)
        (loss * (self.microbatch_size / self.size)).backward()
        return loss.detach()


class PlainLoop:
    """A training loop as one writes it with diffusers: its scheduler adds noise that torch draws, nothing else.

    Args:
        config: of the run; without what the project adds to a stock U-Net.
        device: where.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        model = build_on(config, device)
        self.unet: Any = model.unet.train()
        self.text_encoder, self.scheduler = model.text_encoder, model.noise_scheduler
        self.scale = ARCHITECTURES[config.model.architecture].vae["scaling_factor"]
        self.autocast = _autocast(config, device)
        self.optimizer = _optimizer(config, self.unet)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
        self.device, self.batches = device, _batches(config)
        self.loss = 0.0

    def __call__(self) -> None:
        """Make a step on the next batch and read its loss, as a loop does that logs it."""
        batch = {key: value.to(self.device, non_blocking=True) for key, value in next(self.batches).items()}
        mean, logvar = batch[BatchKey.LATENT_MEAN].float(), batch[BatchKey.LATENT_LOGVAR].float()
        latents = (mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)) * self.scale
        noise = torch.randn_like(latents)
        timesteps = torch.randint(self.scheduler.config["num_train_timesteps"], (len(latents),), device=self.device)
        noised: Any = self.scheduler.add_noise(latents, noise, timesteps)  # pyright: ignore[reportArgumentType]
        with self.autocast():
            with torch.no_grad():
                text = self.text_encoder(batch[BatchKey.TOKEN_IDS])[0]
            prediction = self.unet(noised, timesteps, text, return_dict=False)[0]
        loss = F.mse_loss(prediction.float(), noise)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()


def run_trainer(
    architecture: Architecture,
    *,
    resolution: int,
    batch_size: int,
    num_steps: int,
    overrides: Sequence[str],
    callback: str,
    arguments: dict[str, Any],
) -> Any:
    """Train with the project's Trainer, from random weights drawn on the device, and a callback that measures it.

    Args:
        architecture: Of the model.
        resolution: Side of the images in pixels.
        batch_size: Global.
        num_steps: Length of the run.
        overrides: `key.sub=value`.
        callback: Name of a class in `benchmarks.clocks`.
        arguments: Of it, without `path`, the file that it writes its result to.

    Returns:
        What the callback wrote, and `stall_seconds`: how long each checkpoint stopped training.
    """
    with _shared_folder() as folder:
        path = folder / "measured.json"
        config = run_config(
            folder,
            architecture,
            resolution=resolution,
            batch_size=batch_size,
            num_steps=num_steps,
            overrides=overrides,
            callbacks=[(f"benchmarks.clocks.{callback}", {**arguments, "path": str(path)})],
        )
        train_on_device(config)
        if dist.get_world_size() > 1:
            dist.barrier()
        stalls = [row[STALL] for row in read_metrics(folder / "run" / "metrics.jsonl") if STALL in row]
        return {**json.loads(path.read_text(encoding="utf-8")), "stall_seconds": stalls}


def train_on_device(config: Config) -> Trainer:
    """Train with weights that are drawn on the device: on one core, those of SD2 take 15 s."""
    from diffusion.train import build_training_model, train

    def build(config: Config, device: Device) -> ComposerModel:
        with torch.device("cuda" if device is Device.gpu else "cpu"):
            return build_training_model(config, device)

    return train(config, build)


@contextmanager
def _shared_folder() -> Iterator[Path]:
    """A temporary folder of rank 0 that all ranks use."""
    with tempfile.TemporaryDirectory() as folder:
        names = [folder]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(names)
        yield Path(names[0])
        if dist.get_world_size() > 1:
            dist.barrier()


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Measure the duration of a run, the wait for the device included."""
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def free_memory() -> None:
    """Give back what is no longer used, and begin a new peak of memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def build_on(config: Config, device: torch.device) -> LatentDiffusion:
    """Build a model with random weights, drawn on a device, and with the options of `performance`."""
    with device:
        model = build_model(config.model, config.objective, resolution=config.data.resolution, seed=config.seed)
    fast.apply(model.unet, config.performance, Device.gpu if device.type == "cuda" else Device.cpu)
    torch.backends.cudnn.benchmark = config.performance.cudnn_benchmark
    return model.to(device)


def _optimizer(config: Config, unet: torch.nn.Module) -> torch.optim.AdamW:
    parameters = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    settings = config.optimizer
    return torch.optim.AdamW(parameters, lr=settings.lr, weight_decay=settings.weight_decay, fused=True)


def _autocast(config: Config, device: torch.device) -> Any:
    is_half = config.trainer.precision is not Precision.fp32
    return lambda: torch.autocast(device.type, torch.bfloat16, enabled=is_half)


def _batches(config: Config) -> Iterator[dict[str, Tensor]]:
    data = ResidentLatents(config.model.architecture.value, config.data.resolution)
    while True:
        yield from DataLoader(data, batch_size=config.data.global_batch_size, shuffle=True, drop_last=True)


def _batch(config: Config, device: torch.device) -> dict[str, Tensor]:
    return {key: value.to(device) for key, value in next(_batches(config)).items()}
