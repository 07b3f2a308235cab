"""Grids of sampled images for fixed prompts and seeds, while training."""

import contextlib
import json
from pathlib import Path

import numpy as np
import torch
from composer import Callback, Event, Logger, State
from composer.utils import create_interval_scheduler
from composer.utils import dist as composer_dist
from PIL.PngImagePlugin import PngInfo

from diffusion.config.training import SamplesConfig
from diffusion.distributed import is_first_rank, rank, world_size
from diffusion.ema.averaging import reshard
from diffusion.ema.callbacks import LateStartEMA
from diffusion.errors import explained_writes
from diffusion.files import atomic_path
from diffusion.formats.marks import Mark, save_marked
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.sampling import image_grid, to_pil

GRID_COLUMNS = 8
"""Images in a row of a grid."""


class SampleGrids(Callback):
    """Generate one image per prompt at intervals and at the end, as PNG in the run folder and to the loggers.

    The prompts are divided among the ranks. With an average of the weights, the average is sampled. The grids are
    `step-000100.png` in the folder.
    """

    def __init__(
        self, model: LatentDiffusion, config: SamplesConfig, folder: Path, ema: LateStartEMA | None, run_name: str
    ) -> None:
        self.model, self.config, self.folder, self.ema, self.run_name = model, config, folder, ema, run_name
        self._is_due = create_interval_scheduler(
            config.interval, include_end_of_training=False, checkpoint_events=False
        )
        self._last_step = -1

    def batch_end(self, state: State, logger: Logger) -> None:
        """Sample at an interval in steps, samples or fractions of the run."""
        if self._is_due(state, Event.BATCH_END):
            self._sample(state, logger)

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Sample at an interval in epochs."""
        if self._is_due(state, Event.EPOCH_END):
            self._sample(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        """Sample at the end, unless the last step was sampled."""
        self._sample(state, logger)

    def _sample(self, state: State, logger: Logger) -> None:
        step = state.timestamp.batch.value
        if not self.config.prompts or step in (0, self._last_step):
            return
        self._last_step = step
        with self.ema.swapped_in(state) if self.ema is not None else contextlib.nullcontext(False) as is_average:
            batch = self._generate()
            reshard(state.model)
        if not is_first_rank():
            return
        images = to_pil(batch)
        grid = image_grid(images, min(len(images), GRID_COLUMNS))
        mark = Mark(model=f"{self.run_name} step {step} {'ema' if is_average else 'raw'}")
        path, text = self.folder / f"step-{step:06d}.png", PngInfo()
        description = {
            "step": step,
            "weights": "ema" if is_average else "raw",
            "prompts": self.config.prompts,
            "guidance_scale": self.config.guidance_scale,
            "num_inference_steps": self.config.num_inference_steps,
            "seed": self.config.seed,
            "scores": self.config.scores,
        }
        text.add_text("samples", json.dumps(description))
        with explained_writes(path, "Make room"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(path, durable=False) as partial:
                save_marked(grid, partial, mark, pnginfo=text)
        arrays = [np.asarray(image) for image in images]
        # use_table=True would ask wandb's server for its version, and hang without a network.
        logger.log_images(arrays, name="samples", channels_last=True, step=step, use_table=False)

    def _generate(self) -> torch.Tensor:
        """Generate the images of all prompts, [P, 3, height, width] on the CPU, in equal shares on the ranks."""
        prompts = self.config.prompts
        share = -(-len(prompts) // world_size())
        mine = [min(rank() * share + i, len(prompts) - 1) for i in range(share)]
        images = self.model.generate(
            [prompts[i] for i in mine],
            seed=[self.config.seed + i for i in mine],
            guidance_scale=self.config.guidance_scale,
            scores=self.config.scores,
            num_inference_steps=self.config.num_inference_steps,
            output="tensor",
            progress=False,
        )
        assert isinstance(images, torch.Tensor)
        if world_size() > 1:
            device = next(self.model.network.parameters()).device
            images = torch.cat([part.cpu() for part in composer_dist.all_gather(images.contiguous().to(device))])
        return images[: len(prompts)]
