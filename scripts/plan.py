"""Compare time and cost of planned runs on fleets of GPUs.

    python scripts/plan.py yamls/phase1.yaml yamls/phase2.yaml                    # the published fleets of A100
    python scripts/plan.py yamls/phase1.yaml yamls/phase2.yaml --fleets fleets.json --samples 790e6 300e6
    python scripts/plan.py yamls/phase1.yaml yamls/phase2.yaml --fleet phase1=32xA100 phase2=64xA100
    python scripts/plan.py yamls/phase1.yaml --measured rows.jsonl --gpus 8 32 128 --price 3.5 --network-gb 100

The YAMLs are consecutive runs. A fleet is one of the published table, an object of a JSON list, or a number of GPUs
measured by `python -m benchmarks`. Days exclude failures and restarts.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from diffusion.config.checks import check
from diffusion.config.loading import load_config
from diffusion.config.locations import is_location
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, explained_writes
from diffusion.files import write_json
from diffusion.launch import CommandParser, existing_file, output_file, positive, positive_number, run_command

if TYPE_CHECKING:
    from diffusion.planning.fleets import Fleet


def build_parser() -> CommandParser:
    """The command line."""
    description, _, _ = (__doc__ or "").partition("\n")
    parser = CommandParser(prog="plan.py", description=description)
    parser.add_argument("configs", nargs="*", metavar="RUN.yaml", help="runs, and key.sub=value for all")
    parser.add_argument(
        "--fleets", type=existing_file, metavar="FILE", help="JSON list of fleets; default: the published ones"
    )
    parser.add_argument(
        "--fleet", nargs="+", default=[], metavar="RUN=NxKIND", help="a fleet for each run, by its name"
    )
    parser.add_argument(
        "--measured", type=existing_file, metavar="FILE", help="rows.jsonl of `python -m benchmarks` for a GPU"
    )
    parser.add_argument("--gpus", type=positive, nargs="+", help="with --measured: fleet sizes; default: 8 to 128")
    parser.add_argument("--price", type=float, help="with --measured: dollars per GPU-hour")
    parser.add_argument("--gpu-memory-gb", type=positive_number, help="with --measured: memory of a GPU")
    parser.add_argument("--network-gb", type=positive_number, help="with --measured: a node's GB/s; default: 37.4")
    parser.add_argument("--samples", type=positive_number, nargs="+", help="of each run's data, if not readable here")
    parser.add_argument("--storage-price", type=float, default=0.0, help="dollars per TB and month")
    parser.add_argument("--egress-price", type=float, default=0.0, help="dollars per TB read from the store")
    parser.add_argument("--gpu-hours-between-failures", type=positive_number, help="default: as in the published run")
    parser.add_argument("--save-seconds", type=float, default=30.0, help="stall of training for a checkpoint")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the plan as JSON")
    return parser


def main(arguments: Sequence[str]) -> None:
    """Plan and print."""
    parser = build_parser()
    options = parser.parse_intermixed_args(list(arguments))
    if all("=" in word for word in options.configs):
        parser.error("give the YAML of at least one run")
    of_measured = ("gpus", "price", "gpu_memory_gb", "network_gb")
    if options.measured is None and (given := [name for name in of_measured if getattr(options, name) is not None]):
        parser.error(f"--{given[0].replace('_', '-')} is for the rows of --measured; fleets have their own in --fleets")
    configs = load_configs(options.configs, options.samples)

    from diffusion.planning.fleets import Failures, format_budgets, make_budget

    failures = Failures(save_seconds=options.save_seconds)
    if options.gpu_hours_between_failures:
        failures = replace(failures, gpu_hours_between=options.gpu_hours_between_failures)
    settings = {
        "failures": failures,
        "storage_per_tb_month": options.storage_price,
        "egress_per_tb": options.egress_price,
    }
    fleets = [find_fleets(options, config) for config in configs]
    choices = [list(chosen) for chosen in zip(*fleets, strict=True)]
    if options.fleet:
        choices = [choose_fleets(options.fleet, configs, fleets)]
    budgets = [make_budget(configs, chosen, **settings) for chosen in choices]
    print(format_budgets(budgets, failures))
    if options.json is not None:
        with explained_writes(options.json):
            write_json(options.json, [{"name": budget.name, **budget.totals, **asdict(budget)} for budget in budgets])


def choose_fleets(words: Sequence[str], configs: Sequence[Config], fleets: "Sequence[list[Fleet]]") -> "list[Fleet]":
    """The fleet of each run, among those for it, from words such as phase1=32xA100."""
    from diffusion.planning.fleets import fleet_called

    chosen = {run: fleet for run, _, fleet in (word.partition("=") for word in words)}
    names = [config.run_name for config in configs]
    if chosen.keys() != {*names}:
        raise ConfigurationError(f"--fleet {' '.join(words)}: give NAME=NxKIND for each run: {', '.join(names)}")
    return [fleet_called(chosen[name], known) for name, known in zip(names, fleets, strict=True)]


def load_configs(words: Sequence[str], samples: Sequence[float] | None) -> list[Config]:
    """Load each run, with the overrides that apply to all."""
    files, overrides = [word for word in words if "=" not in word], [word for word in words if "=" in word]
    if samples is not None and len(samples) != len(files):
        raise ConfigurationError(f"--samples has {len(samples)} numbers for {len(files)} runs: give one for each")
    configs = [load_config(file, overrides, may_lack=is_location) for file in files]
    for config, number in zip(configs, samples or [], strict=samples is not None):
        config.plan.num_samples = int(number)
    for config in configs:
        check(config, world_size=None, may_be_random=True)
    return configs


def find_fleets(options: Namespace, config: Config) -> "list[Fleet]":
    """The requested fleets, with their throughput in a run."""
    from diffusion.planning.fleets import A100_FLEETS, fleets_from_benchmark, read_fleets

    fleets = read_fleets(options.fleets) if options.fleets is not None else []
    if options.measured is not None:
        fleets += fleets_from_benchmark(
            options.measured,
            options.gpus or [8, 16, 32, 64, 128],
            architecture=config.model.architecture,
            parallelism=config.trainer.parallelism,
            network=(options.network_gb or 37.4) * 1e9,
            price_per_gpu_hour=options.price,
            gpu_memory_bytes=options.gpu_memory_gb * 1e9 if options.gpu_memory_gb is not None else None,
        )
    return fleets or A100_FLEETS


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
