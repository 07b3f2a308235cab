"""Fleets of GPUs side by side: throughput, and time and cost of several runs together, each on its fleet."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from diffusion.config.checks import rank_problems
from diffusion.config.data import ImageSize
from diffusion.config.model import Architecture, ModelConfig
from diffusion.config.schema import Config, Task
from diffusion.config.training import Parallelism
from diffusion.errors import ConfigurationError
from diffusion.planning.amounts import DAYS_PER_MONTH, SECONDS_PER_DAY, plan_epoch, sum_known
from diffusion.planning.memory import parameter_counts
from diffusion.planning.plan import (
    UNKNOWN,
    Plan,
    largest_microbatch,
    mean_training_flops,
    number_text,
    plan_run,
    size_text,
    training_flops,
)

# Published figures, of MosaicML's write-up and its benchmark tables (docs/planning.md). Rates are of the U-Net alone:
# latents computed beforehand, fp16, global batch 2,048, at most 16 images per GPU at a time.

A100_RATES = {
    8: {256: 1_100, 512: 290},
    16: {256: 2_180, 512: 585},
    32: {256: 4_080, 512: 1_195},
    64: {256: 8_530, 512: 2_340},
    128: {256: 11_600, 512: 4_590},
}
"""Images per second by number of A100 and resolution."""

NAMES = {"fleet", "run", "nodes"}
"""Columns that say what a row is about."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """GPUs of one kind, and their throughput."""

    name: str
    num_gpus: int
    images_per_second: dict[int, float]
    """By resolution, of all GPUs, or of one with `network`; other resolutions and architectures go by their
    floating-point operations."""

    architecture: Architecture = Architecture.stable_diffusion_2
    """Architecture of these images per second."""

    network: float | None = None
    """Bytes per second of a node's network, by which `predict_images_per_second` has the throughput of all GPUs."""

    price_per_gpu_hour: float | None = None
    """In dollars."""

    gpu_memory_bytes: float | None = None
    host_seconds: float = 0.0
    """Time in which the host queues a step, however few images it has: the limit of small models on many GPUs."""

    deviation: float | None = None
    """Half the range of repeated measurements over their median; None for a single one."""


A100_FLEETS = [
    Fleet(
        name=f"{num_gpus} A100",
        num_gpus=num_gpus,
        price_per_gpu_hour=2.0,
        gpu_memory_bytes=80e9,
        images_per_second={side: float(rate) for side, rate in rates.items()},
    )
    for num_gpus, rates in A100_RATES.items()
]


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Independent failures of GPUs, and what a checkpoint takes."""

    gpu_hours_between: float = 20_051 / 2
    """By default those of the published run's training, with two failures: few to estimate a rate from."""

    save_seconds: float = 30.0
    """Stall of a step that saves a checkpoint."""

    def save_interval(self, num_gpus: int) -> float:
        """Best time between checkpoints in seconds, to first order (Young 1974).

        sqrt(2 save M), where M is the mean time between two failures of the fleet.
        """
        return math.sqrt(2 * self.save_seconds * self.gpu_hours_between * 3600 / num_gpus)


@dataclass(frozen=True, kw_only=True)
class FleetRun:
    """Time and cost of a run on a fleet. None: unknown."""

    fleet: Fleet
    plan: Plan
    storage_cost: float | None
    egress_cost: float | None
    save_interval_steps: int
    """Recommended."""

    problems: list[str]
    """Reasons for which the run cannot start on the fleet."""

    @property
    def cost(self) -> float | None:
        """Sum of known costs; None without a price of GPUs."""
        if self.plan.cost is None:
            return None
        return self.plan.cost + (self.storage_cost or 0.0) + (self.egress_cost or 0.0)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Time and cost of several runs, one after the other. None: unknown."""

    name: str
    """Name of the fleet, or of the fleet of each run."""

    runs: list[FleetRun]

    @property
    def totals(self) -> dict[str, float | None]:
        """Sums over the runs: days without failures, GPU-hours, and dollars; `cost` as that of a run."""
        columns = {
            "days": [plan.days for plan in self.plans],
            "gpu_hours": [plan.gpu_hours for plan in self.plans],
            "gpu_cost": [plan.cost for plan in self.plans],
            "storage_cost": [run.storage_cost for run in self.runs],
            "egress_cost": [run.egress_cost for run in self.runs],
            "cost": [run.cost for run in self.runs],
        }
        return {name: sum_known(values) for name, values in columns.items()}

    @property
    def plans(self) -> list[Plan]:
        """Plans of the runs."""
        return [run.plan for run in self.runs]


def plan_on(
    config: Config,
    fleet: Fleet,
    *,
    failures: Failures,
    storage_per_tb_month: float = 0.0,
    egress_per_tb: float = 0.0,
) -> FleetRun:
    """Compute time and cost of a run on a fleet.

    Dollars for storage are of data, kept checkpoints and stored averages for the days of the run, those for egress
    of downloads from `data.remote`; 0: not counted.
    """
    assumed = replace(
        config.plan,
        num_gpus=fleet.num_gpus,
        images_per_second=rate_for(fleet, config),
        price_per_gpu_hour=fleet.price_per_gpu_hour,
        gpu_memory_gb=fleet.gpu_memory_bytes / 1e9 if fleet.gpu_memory_bytes else config.plan.gpu_memory_gb,
    )
    plan = plan_run(replace(config, plan=assumed))
    assert plan.days is not None
    seconds, checkpoints = plan.days * SECONDS_PER_DAY, plan.checkpoints
    stored = (plan.tiers.data_bytes, checkpoints.kept_bytes, checkpoints.average_bytes)
    interval = min(seconds, max(seconds / plan.num_iterations, failures.save_interval(fleet.num_gpus)))
    return FleetRun(
        fleet=fleet,
        plan=plan,
        storage_cost=_cost(storage_per_tb_month * plan.days / DAYS_PER_MONTH, *stored),
        egress_cost=_cost(egress_per_tb, plan.tiers.fetched_bytes),
        save_interval_steps=max(1, round(interval / seconds * plan.num_iterations)),
        problems=rank_problems(config, fleet.num_gpus),
    )


def make_budget(configs: Sequence[Config], fleets: Sequence[Fleet], **options: Any) -> Budget:
    """Compute time and cost of runs, each on its fleet; options as for `plan_on`."""
    runs = [plan_on(*pair, **options) for pair in zip(configs, fleets, strict=True)]
    names = [fleet.name for fleet in fleets]
    if len(set(names)) > 1:
        names = [", ".join(f"{run.plan.run_name} on {name}" for run, name in zip(runs, names, strict=True))]
    return Budget(name=names[0], runs=runs)


def fleet_called(name: str, fleets: Sequence[Fleet]) -> Fleet:
    """Find a fleet by its name, or by a number of GPUs and a part of it, as `32xA100`; else a ConfigurationError."""
    short = re.fullmatch(r"(\d+)x(.+)", name)
    for fleet in fleets:
        if fleet.name == name or (short and fleet.num_gpus == int(short[1]) and short[2].lower() in fleet.name.lower()):
            return fleet
    raise ConfigurationError(f"there is no fleet {name}: choose one of {', '.join(one.name for one in fleets)}")


def _cost(price_per_tb: float, *num_bytes: float | None) -> float | None:
    """Cost of some bytes together; 0 without a price, None if a number is unknown."""
    costs = (None if size is None else price_per_tb * size / 1e12 for size in num_bytes)
    return sum_known(costs) if price_per_tb else 0.0


def rate_for(fleet: Fleet, config: Config) -> float:
    """Images per second of a fleet in a run, by floating-point operations from those at the nearest resolution.

    Those of one GPU are scaled before its throughput is that of all: communication does not go by operations. At most
    those of steps that the host queues one after the other.

    Raises:
        ConfigurationError: the rate is unknown.
    """
    if config.task is not Task.diffusion:
        raise ConfigurationError(
            f"run {config.run_name} trains a VAE, but the rates of a fleet are of U-Nets: measure its images per "
            "second, and plan it with run.py --dry-run plan.images_per_second=..."
        )
    side = config.data.resolution
    nearest = min(fleet.images_per_second, key=lambda one: abs(one - side))
    known = training_flops(Config(model=ModelConfig(architecture=fleet.architecture)), ImageSize(nearest, nearest))
    own = mean_training_flops(config, plan_epoch(config, 0).streams if len(config.data.known_sizes) > 1 else [])
    if known is None or own is None:
        raise ConfigurationError(
            f"fleet {fleet.name} has no images_per_second of this network at {side} px, and model.network has blocks "
            "whose operations are not known: measure it with `python -m benchmarks step`"
        )
    rate = fleet.images_per_second[nearest] * (known / own)
    if fleet.network is not None:
        counts = parameter_counts(config)
        rate = predict_images_per_second(
            fleet.num_gpus,
            images_per_gpu_second=rate,
            num_parameters=counts.trained + counts.fixed,
            global_batch_size=config.data.global_batch_size,
            network=fleet.network,
            gpus_per_node=config.plan.gpus_per_node,
        )
    return min(rate, config.data.global_batch_size / fleet.host_seconds) if fleet.host_seconds else rate


# Throughput of many GPUs from that of one

BACKWARD_SHARE = 2 / 3
"""Share of a step's computation that hides communication."""

NETWORK_BYTES = 6
"""Per parameter and step: gathered weights in half precision, and gradients in fp32."""

OPTIMIZER_BYTES = 28
"""Memory traffic of AdamW per parameter: weight, gradient and two moments are read, all but the gradient written."""

GPU_LINK = 200e9
"""Effective bytes per second between the GPUs of a node."""

GPU_MEMORY_BANDWIDTH = 1.5e12

IDLE = 0.2
"""Idle share of a GPU from which on the host is the limit of a measured step."""

DDP = "trainer.parallelism=ddp"
"""Override of measured runs without FSDP2, which takes more of the host's time."""

PUBLISHED_NETWORK = 37.4e9
"""Bytes per second of a node's network, fitted to one entry of the published table (256 px on 128 A100); 75 % of a
400 Gbit/s network."""


def predict_images_per_second(
    num_gpus: int,
    *,
    images_per_gpu_second: float,
    num_parameters: int,
    global_batch_size: int,
    network: float = PUBLISHED_NETWORK,
    gpus_per_node: int = 8,
) -> float:
    """Throughput of a fleet with SHARD_GRAD_OP and `performance.accumulate_locally`.

    Weights are gathered and gradients reduced once per step. Ring collectives carry each byte over the network of each
    node once, and within a node over the links of a GPU. What the backward pass does not hide adds to the step. The
    optimizer works on a GPU's shard.

    Args:
        num_gpus: GPUs of the fleet.
        images_per_gpu_second: throughput of one GPU.
        num_parameters: parameters of the network.
        global_batch_size: images per step.
        network: bytes per second of a node's network, in each direction.
        gpus_per_node: GPUs whose links replace the network.
    """
    computing = global_batch_size / num_gpus / images_per_gpu_second
    moved = num_parameters * NETWORK_BYTES * (num_gpus - 1) / num_gpus
    communicating = moved / (GPU_LINK if num_gpus <= gpus_per_node else network)
    exposed = max(0.0, communicating - BACKWARD_SHARE * computing)
    optimizing = num_parameters / num_gpus * OPTIMIZER_BYTES / GPU_MEMORY_BANDWIDTH
    return global_batch_size / (computing + exposed + optimizing)


# Fleets from files


def read_fleets(path: Path) -> list[Fleet]:
    """Read fleets from a JSON list of objects with the fields of `Fleet`; a ConfigurationError if that fails."""
    try:
        fleets = []
        for entry in json.loads(path.read_text(encoding="utf-8")):
            rates = {int(side): _amount(side, rate) for side, rate in entry["images_per_second"].items()}
            if not rates:
                raise ValueError(f"{entry['name']} has no images_per_second")
            architecture = Architecture(entry.get("architecture", Architecture.stable_diffusion_2.value))
            _amount("num_gpus", entry["num_gpus"])
            fields = {"name": str(entry["name"]), "num_gpus": int(str(entry["num_gpus"])), "images_per_second": rates}
            for name in ("price_per_gpu_hour", "gpu_memory_bytes", "network", "host_seconds", "deviation"):
                if (value := entry.get(name)) is not None:
                    fields[name] = _amount(name, value, may_be_zero=name not in ("gpu_memory_bytes", "network"))
            fleets.append(Fleet(**{**entry, **fields, "architecture": architecture}))
        if not fleets:
            raise ValueError("it is empty")
        return fleets
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f'{path} is not a list of fleets ({error}): give e.g. [{{"name": "ours", "num_gpus": 64, '
            '"price_per_gpu_hour": 3.5, "images_per_second": {"256": 30000, "512": 8000}}]'
        ) from error


def _amount(name: str, value: Any, *, may_be_zero: bool = False) -> float:
    """Return a finite number above 0, given as a number or text; anything else is a ValueError."""
    number = float(value)
    if not math.isfinite(number) or number < 0 or (number == 0 and not may_be_zero):
        raise ValueError(f"{name} is {value}")
    return number


def fleets_from_benchmark(
    path: Path,
    sizes: Sequence[int],
    *,
    architecture: Architecture,
    parallelism: Parallelism,
    **options: Any,
) -> list[Fleet]:
    """Fleets of some sizes of the GPU that `python -m benchmarks` measured, with the rates of one.

    The file of rows has one GPU's steps of the Trainer at each resolution. Rows of a run's architecture count, without
    any those of the first row's; of the host's time, those of its parallelism, without any there is no limit. Options
    are further fields of `Fleet`, such as the network and the price.

    Raises:
        ConfigurationError: the file holds no such measurement.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        rows = [
            {**line["parameters"], **line["result"], "machine": line["machine"]["device"]}
            for line in lines
            if line.get("kind") == "trainer" and line.get("result", {}).get("num_gpus") == 1
        ]
        if all(row["architecture"] != architecture.value for row in rows):
            architecture = Architecture(rows[0]["architecture"])
        rows = [row for row in rows if row["architecture"] == architecture.value]
        best = {row["resolution"]: row for row in sorted(rows, key=lambda row: row["images_per_second"])}
        is_ddp = parallelism is Parallelism.ddp
        waiting = [
            row["seconds"]
            for row in rows
            if row.get("idle", 0.0) > IDLE and (DDP in row.get("overrides", ())) is is_ddp
        ]
        machine = rows[0]["machine"]
        deviation = max(row["deviation"] for row in best.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigurationError(
            f"{path} holds no steps of the Trainer ({error}): make it with `python -m benchmarks step --out FOLDER`"
        ) from error
    return [
        Fleet(
            name=f"{number} x {machine}",
            num_gpus=number,
            images_per_second={side: row["images_per_second"] for side, row in best.items()},
            architecture=architecture,
            host_seconds=min(waiting, default=0.0),
            deviation=deviation,
            **options,
        )
        for number in sizes
    ]


# Tables


def format_budgets(budgets: Sequence[Budget], failures: Failures) -> str:
    """Write time and cost of the same runs on several fleets, side by side."""
    plans = budgets[0].plans
    tables = {
        "Together " + " and ".join(f"{plan.num_images:,} images ({plan.run_name})" for plan in plans): [
            _cost_row(budget) for budget in budgets
        ],
        "Memory of one GPU": [_memory_row(run) for budget in budgets for run in budget.runs],
        "Data and checkpoints": [_data_row(plan) for plan in plans],
        "Tiers of storage": [_tier_row(run) for budget in budgets for run in budget.runs],
    }
    parts = [f"{title}\n{table}\n" for title, rows in tables.items() if (table := _table(rows))]
    is_limited = any(run.fleet.host_seconds for budget in budgets for run in budget.runs)
    host = (
        "On a measured fleet,\n    a step takes at least the time in which the host queued one of the measured network."
        if is_limited
        else "The time\n    in which the host queues a step of this parallelism is not known, and not counted."
    )
    notes = f"""Assumed
  - Images per second at other resolutions and of other networks go by floating-point operations. {host}
  - Interval of checkpoints: for one failure in {failures.gpu_hours_between:,.0f} GPU-hours and stalls of \
{failures.save_seconds:g} s.
  - Storage: data, kept checkpoints and stored averages, for the days of each run. Egress: of runs with data.remote,
    each sample once where the nodes' disks hold what they read, else in every epoch.
  - Operations on images: those of the VAE, and of the image encoder of model.alignment, are not counted."""
    impossible = [
        f"{run.plan.run_name} would not start on {run.fleet.name}. {problem}"
        for budget in budgets
        for run in budget.runs
        for problem in run.problems
    ]
    assumed = dict.fromkeys(f"  - {assumption}" for plan in plans for assumption in plan.assumptions)
    return "\n".join([*parts, *impossible, notes, *assumed])


def _table(rows: Sequence[dict[str, str]]) -> str:
    """Text of a table without unknown columns; empty if only `NAMES` are left."""
    table = pd.DataFrame(rows)
    table = table.loc[:, (table != UNKNOWN).any()]
    return "" if NAMES.issuperset(table.columns) else table.to_string(index=False)


def _cost_row(budget: Budget) -> dict[str, str]:
    totals = budget.totals
    days = totals["days"] or 0.0
    days_text = f"{days:,.2f}"
    if any(run.fleet.deviation is not None for run in budget.runs):
        spread = sum((run.plan.days or 0.0) * (run.fleet.deviation or 0.0) for run in budget.runs)
        days_text += f" ({days - spread:,.2f} to {days + spread:,.2f})"
    return {
        "fleet": budget.name,
        **{f"{plan.run_name} img/s": number_text(plan.images_per_second, "{:,.0f}") for plan in budget.plans},
        "days": days_text,
        "GPU-hours": number_text(totals["gpu_hours"], "{:,.0f}"),
        "cost": number_text(totals["gpu_cost"], "${:,.0f}"),
        "+ storage": number_text(totals["storage_cost"], "${:,.0f}"),
        "+ egress": number_text(totals["egress_cost"], "${:,.0f}"),
        **{f"{run.plan.run_name} save": f"{run.save_interval_steps:,}ba" for run in budget.runs},
    }


def _memory_row(run: FleetRun) -> dict[str, str]:
    plan = run.plan
    memory = plan.memory
    return {
        "fleet": run.fleet.name,
        "run": plan.run_name,
        "state": size_text(memory.state_bytes),
        "frozen": size_text(memory.frozen_bytes),
        "reduction": size_text(memory.reduction_bytes),
        "microbatch": str(memory.microbatch_size),
        "activations": size_text(memory.activation_bytes),
        "largest microbatch": largest_microbatch(plan),
    }


def _data_row(plan: Plan) -> dict[str, str]:
    epochs = plan.num_images / plan.num_samples if plan.num_samples else None
    return {
        "run": plan.run_name,
        "epochs": number_text(epochs, "{:,.2f}"),
        "bytes per sample": number_text(plan.tiers.sample_bytes, "{:,}"),
        "data": size_text(plan.tiers.data_bytes),
        "checkpoints kept": number_text(plan.checkpoints.num_kept, "{:,}"),
        "together": size_text(plan.checkpoints.kept_bytes),
    }


def _tier_row(run: FleetRun) -> dict[str, str]:
    plan, tiers = run.plan, run.plan.tiers
    reading = tiers.sample_bytes * (plan.images_per_second or 0) if tiers.sample_bytes else None
    return {
        "fleet": run.fleet.name,
        "run": plan.run_name,
        "nodes": f"{tiers.num_nodes:,}",
        "store holds": size_text(tiers.data_bytes),
        "all nodes read per second": size_text(reading),
        "a node reads per epoch": size_text(tiers.node_bytes),
        "fetched by a node in later epochs": size_text(tiers.epoch_bytes),
        "fetched in all": size_text(tiers.fetched_bytes),
        "disk per node": size_text(tiers.disk_bytes),
        "shared memory": size_text(tiers.memory_bytes),
    }
