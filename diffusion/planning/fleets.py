"""Fleets of GPUs side by side: how fast they are, and what several runs together take and cost on each."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffusion.config.data import ImageSize
from diffusion.config.model import Architecture, ModelConfig
from diffusion.config.schema import Config, Task
from diffusion.errors import ConfigurationError
from diffusion.planning.network import training_flops
from diffusion.planning.plan import SECONDS_PER_DAY, Plan, plan_run
from diffusion.planning.scaling import Interconnect, StepModel, predict_images_per_second

DAYS_PER_MONTH = 365.25 / 12

# From MosaicML's "Training Stable Diffusion from Scratch for <$50k, part 2" and its benchmark tables: the U-Net alone,
# latents computed beforehand, fp16, global batch 2,048, at most 16 images per GPU at a time.

A100_RATES = {
    8: {256: 1_100, 512: 290},
    16: {256: 2_180, 512: 585},
    32: {256: 4_080, 512: 1_195},
    64: {256: 8_530, 512: 2_340},
    128: {256: 11_600, 512: 4_590},
}
"""Images per second of so many A100, by resolution."""

PRICE_PER_A100_HOUR = 2.0
"""In dollars."""

A100_MEMORY_BYTES = 80e9

TRAINING_A100_HOURS, LATENTS_A100_HOURS = 20_051, 3_784
"""What the published run took: training, and latents computed beforehand."""

HARDWARE_FAILURES = 2
"""Of the published run, in so many A100-hours of training: few to estimate a rate from."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """GPUs of one kind, and how many images per second they train together."""

    name: str
    num_gpus: int
    images_per_second: dict[int, float]
    """By resolution; other resolutions and architectures go by their floating-point operations."""

    architecture: Architecture = Architecture.stable_diffusion_2
    """Whose images these are."""

    price_per_gpu_hour: float | None = None
    """In dollars."""

    gpu_memory_bytes: float | None = None
    deviation: float | None = None
    """Half the range of repeated measurements over their median; None where there was one."""

    source: str = "given"


A100_FLEETS = [
    Fleet(
        name=f"{num_gpus} A100",
        num_gpus=num_gpus,
        price_per_gpu_hour=PRICE_PER_A100_HOUR,
        gpu_memory_bytes=A100_MEMORY_BYTES,
        images_per_second={side: float(rate) for side, rate in rates.items()},
        source="published table",
    )
    for num_gpus, rates in A100_RATES.items()
]


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What is paid beside GPUs, in dollars; 0 is not counted."""

    storage_per_tb_month: float = 0.0
    egress_per_tb: float = 0.0
    per_million_requests: float = 0.0
    disk_per_tb_month: float = 0.0
    """Of the nodes' own disks, where they are paid apart from the GPUs."""


@dataclass(frozen=True, kw_only=True)
class Breakdowns:
    """How often GPUs fail, and what that costs in time."""

    gpu_hours_between_failures: float
    restart_seconds: float = 600.0
    """From a failure to the next step."""

    save_seconds: float = 30.0
    """Stall of a step that saves a checkpoint."""

    def mean_seconds(self, num_gpus: int) -> float:
        """Return the mean time between two failures of a fleet."""
        return self.gpu_hours_between_failures * 3600 / num_gpus


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What several runs, one after the other, take on a fleet. None is not known."""

    fleet: Fleet
    plans: list[Plan]
    days: float
    gpu_hours: float
    gpu_cost: float | None
    storage_cost: float | None
    egress_cost: float | None
    request_cost: float | None
    disk_cost: float | None
    days_with_failures: float
    """With checkpoints, failures and restarts: the mean by Daly's formula."""

    save_interval_steps: list[int]
    """Recommended, for each run."""

    assumptions: list[str] = field(default_factory=list)

    @property
    def cost(self) -> float | None:
        """Of everything that is known; None without a price of GPUs."""
        if self.gpu_cost is None:
            return None
        parts = (self.storage_cost, self.egress_cost, self.request_cost, self.disk_cost)
        return self.gpu_cost + sum(part or 0.0 for part in parts)

    @property
    def days_range(self) -> tuple[float, float] | None:
        """Days if each measurement was as far off as repeated ones were from one another."""
        deviation = self.fleet.deviation
        return None if deviation is None else (self.days * (1 - deviation), self.days * (1 + deviation))


def rate_for(fleet: Fleet, config: Config) -> float:
    """Images per second of a fleet in a run: as given for its resolution, else by floating-point operations.

    Raises:
        ConfigurationError: the fleet has no rate at all, one of the architectures cannot be counted, or the run
            trains a VAE.
    """
    if config.task is not Task.diffusion:
        raise ConfigurationError(
            f"run {config.run_name} trains a VAE, but the rates of a fleet are of U-Nets: measure its images per "
            "second, and plan it with run.py --dry-run plan.images_per_second=..."
        )
    resolution = config.data.resolution
    model = config.model
    same = model.architecture is fleet.architecture and not model.unet and model.lora is None
    if same and resolution in fleet.images_per_second:
        return fleet.images_per_second[resolution]
    if not fleet.images_per_second:
        raise ConfigurationError(f"fleet {fleet.name} has no images_per_second: give it for one resolution at least")
    nearest = min(fleet.images_per_second, key=lambda side: abs(side - resolution))
    reference = Config(model=ModelConfig(architecture=fleet.architecture))
    known = training_flops(reference, ImageSize(nearest, nearest))
    asked = training_flops(config, ImageSize(resolution, resolution))
    if known is None or asked is None:
        raise ConfigurationError(
            f"fleet {fleet.name} has no images_per_second at {resolution} px, and model.unet has blocks whose "
            "operations are not known: measure it with benchmarks/__main__.py step"
        )
    return fleet.images_per_second[nearest] * known / asked


def make_budget(
    configs: Sequence[Config],
    fleet: Fleet,
    *,
    prices: Prices,
    breakdowns: Breakdowns,
) -> Budget:
    """Work out what runs take on a fleet.

    Args:
        configs: the runs.
        fleet: on which they run one after the other.
        prices: of storage and egress.
        breakdowns: how often GPUs fail.
    """
    plans, steps, with_failures = [], [], 0.0
    for config in configs:
        planned = replace(
            config.plan,
            num_gpus=fleet.num_gpus,
            images_per_second=rate_for(fleet, config),
            price_per_gpu_hour=fleet.price_per_gpu_hour,
            gpu_memory_gb=fleet.gpu_memory_bytes / 1e9 if fleet.gpu_memory_bytes else config.plan.gpu_memory_gb,
        )
        plan = plan_run(replace(config, plan=planned))
        assert plan.days is not None
        seconds = plan.days * SECONDS_PER_DAY
        interval = min(seconds, save_interval(breakdowns, fleet.num_gpus))
        with_failures += expected_seconds(seconds, interval, breakdowns, fleet.num_gpus)
        steps.append(max(1, round(interval / seconds * plan.num_iterations)))
        plans.append(plan)
    days = sum(plan.days or 0.0 for plan in plans)
    gpu_hours = sum(plan.gpu_hours or 0.0 for plan in plans)
    return Budget(
        fleet=fleet,
        plans=plans,
        days=days,
        gpu_hours=gpu_hours,
        gpu_cost=gpu_hours * fleet.price_per_gpu_hour if fleet.price_per_gpu_hour is not None else None,
        storage_cost=_held_cost(plans, prices.storage_per_tb_month, [_stored(plan) for plan in plans]),
        egress_cost=_cost(prices.egress_per_tb / 1e12, [plan.tiers.fetched_bytes for plan in plans]),
        request_cost=_cost(prices.per_million_requests / 1e6, [plan.tiers.requests for plan in plans]),
        disk_cost=_held_cost(plans, prices.disk_per_tb_month, [_on_disks(plan) for plan in plans]),
        days_with_failures=with_failures / SECONDS_PER_DAY,
        save_interval_steps=steps,
        assumptions=_assumptions(fleet, breakdowns, prices),
    )


def save_interval(breakdowns: Breakdowns, num_gpus: int) -> float:
    """Return the best time between checkpoints in seconds, to first order: sqrt(2 save M) (Young 1974).

    M is the mean time between two failures of the fleet.
    """
    return math.sqrt(2 * breakdowns.save_seconds * breakdowns.mean_seconds(num_gpus))


def expected_seconds(work: float, interval: float, breakdowns: Breakdowns, num_gpus: int) -> float:
    """Return the mean duration of a run with independent failures (Daly 2006, equation 13).

    (M + restart) (exp((interval + save) / M) - 1) for each interval: after a failure the run restarts and repeats the
    work since its newest checkpoint.

    Args:
        work: seconds of training.
        interval: seconds of training between two checkpoints.
        breakdowns: how often GPUs fail.
        num_gpus: of the fleet.
    """
    mean = breakdowns.mean_seconds(num_gpus)
    segment = (mean + breakdowns.restart_seconds) * math.expm1((interval + breakdowns.save_seconds) / mean)
    return work / interval * segment


def _stored(plan: Plan) -> float | None:
    """Bytes of a run's data and of all its checkpoints that stay."""
    return None if plan.data_bytes is None or plan.storage_bytes is None else plan.data_bytes + plan.storage_bytes


def _on_disks(plan: Plan) -> float | None:
    return None if plan.tiers.disk_bytes is None else plan.tiers.num_nodes * plan.tiers.disk_bytes


def _held_cost(plans: Sequence[Plan], price_per_tb_month: float, held: Sequence[float | None]) -> float | None:
    """Of bytes that are held for as long as each run takes."""
    months = [(plan.days or 0.0) / DAYS_PER_MONTH for plan in plans]
    amounts = [None if size is None else size * time for size, time in zip(held, months, strict=True)]
    return _cost(price_per_tb_month / 1e12, amounts)


def _cost(price: float, amounts: Sequence[float | None]) -> float | None:
    """Of all amounts together; nothing where there is no price, None where one is not known."""
    known = [amount for amount in amounts if amount is not None]
    return price * sum(known) if not price or len(known) == len(amounts) else None


def _assumptions(fleet: Fleet, breakdowns: Breakdowns, prices: Prices) -> list[str]:
    hours = breakdowns.gpu_hours_between_failures
    notes = [
        f"Images per second: {fleet.source}; at other resolutions and for other networks by floating-point operations.",
        f"Failures: independent, one in {hours:,.0f} GPU-hours; {breakdowns.restart_seconds:g} s to restart, "
        f"{breakdowns.save_seconds:g} s for which training waits for a checkpoint, at the recommended interval.",
    ]
    if prices.storage_per_tb_month:
        notes.append("Storage: data and checkpoints that stay, for the days of each run.")
    if prices.egress_per_tb:
        notes.append(
            "Egress: of runs with data.remote: each sample once where the nodes' disks hold what they read, else in "
            "every epoch."
        )
    if prices.per_million_requests:
        notes.append("Requests: a HEAD and a GET for each shard that is fetched; checkpoints are not counted.")
    if prices.disk_per_tb_month:
        notes.append("Disks: what the caches hold, for the days of each run.")
    return notes


def read_fleets(path: Path) -> list[Fleet]:
    """Read fleets from a JSON list of objects with the fields of `Fleet`.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        return [_fleet(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f'{path} is no list of fleets ({error}): give e.g. [{{"name": "ours", "num_gpus": 64, '
            '"price_per_gpu_hour": 3.5, "images_per_second": {"256": 30000, "512": 8000}}]'
        ) from error


def _fleet(entry: dict[str, Any]) -> Fleet:
    rates = {int(side): float(rate) for side, rate in entry["images_per_second"].items()}
    architecture = Architecture(entry.get("architecture", Architecture.stable_diffusion_2.value))
    return Fleet(**{**entry, "images_per_second": rates, "architecture": architecture})


def fleets_from_benchmark(
    path: Path,
    sizes: Sequence[int],
    *,
    links: Interconnect,
    num_parameters: int,
    global_batch_size: int,
    **options: Any,
) -> list[Fleet]:
    """Fleets of the GPU that `benchmarks/__main__.py` measured, by the model of scaling.

    Args:
        path: its file of rows, with one GPU's steps of the Trainer at each resolution.
        sizes: numbers of GPUs.
        links: between them.
        num_parameters: of the network that was measured.
        global_batch_size: of the runs.
        options: further fields of `Fleet`, such as the price.

    Raises:
        ConfigurationError: the file holds no such measurement.
    """
    best: dict[int, dict[str, Any]] = {}
    try:
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if line.get("kind") != "trainer" or line.get("result", {}).get("num_gpus") != 1:
                continue
            row = {**line["parameters"], **line["result"], "machine": line["machine"]["device"]}
            if row["images_per_second"] > best.get(row["resolution"], {"images_per_second": 0.0})["images_per_second"]:
                best[row["resolution"]] = row
        machine, architecture = next((row["machine"], Architecture(row["architecture"])) for row in best.values())
    except (OSError, ValueError, KeyError, TypeError, StopIteration) as error:
        raise ConfigurationError(
            f"{path} holds no steps of the Trainer ({error}): make it with benchmarks/__main__.py step --out FOLDER"
        ) from error
    models = {
        side: StepModel(
            num_parameters=num_parameters,
            global_batch_size=global_batch_size,
            microbatch_size=row["microbatch_size"],
            images_per_gpu_second=row["images_per_second"],
        )
        for side, row in best.items()
    }
    return [
        Fleet(
            name=f"{number} x {machine}",
            num_gpus=number,
            images_per_second={side: predict_images_per_second(model, links, number) for side, model in models.items()},
            architecture=architecture,
            deviation=max(row["deviation"] for row in best.values()),
            source=f"one GPU measured ({path.name}), the fleet by the model of scaling",
            **options,
        )
        for number in sizes
    ]
