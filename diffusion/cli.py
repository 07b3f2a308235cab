"""The commands `run.py` (training, or with `--dry-run` its plan) and `evaluate.py`, from a YAML file each."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from diffusion.config.checks import check
from diffusion.config.fields import check_sections
from diffusion.config.loading import load_complete, load_config, to_public_yaml
from diffusion.config.locations import is_location, missing_locations
from diffusion.config.schema import Config
from diffusion.distributed import is_first_rank, world_size
from diffusion.evaluation.config import EvaluationConfig
from diffusion.launch import CommandParser


def train_command(arguments: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Train as a YAML file says, or `say` the plan. The same command again continues the run.

    Raises:
        UserError: the configuration, the data or the machine is at fault.
    """
    parser = _parser("run.py", "Train a text-to-image model. Started again, a run continues.")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the plan, and train nothing"
    )
    options = parser.parse_intermixed_args(list(arguments))
    if options.config is None:
        parser.error("name the configuration of the run, such as yamls/phase1.yaml")
    config = load_config(
        options.config, options.overrides, may_lack=is_location if options.dry_run else lambda key: False
    )
    check(config, world_size=(config.plan.num_gpus if options.dry_run else None) or world_size())
    if options.dry_run:
        if is_first_rank():
            _show_plan(config, say)
        return
    from diffusion.train import train

    _start_logging()
    train(config)


def _parser(program: str, description: str) -> CommandParser:
    parser = CommandParser(prog=program, description=description)
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="the configuration")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the file")
    return parser


def _start_logging() -> None:
    """Log what this package does on rank 0 only, and warnings, of libraries as well, on every rank."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("diffusion").setLevel(logging.INFO if is_first_rank() else logging.WARNING)


def _show_plan(config: Config, say: Callable[[str], None]) -> None:
    from diffusion.loading import absent_weights, check_objective
    from diffusion.models.architectures import image_side_factor, num_text_tokens
    from diffusion.planning.amounts import absent_streams
    from diffusion.planning.plan import format_plan, plan_run
    from diffusion.plugins import check_plugins

    num_ranks = config.plan.num_gpus or world_size()
    model = config.model
    check(config, world_size=num_ranks, side_factor=image_side_factor(config), num_text_tokens=num_text_tokens(model))
    check_plugins(config)
    check_objective(config)
    say(to_public_yaml(config))
    missing = missing_locations(config) | absent_streams(config) | absent_weights(config)
    say(format_plan(plan_run(config, world_size=world_size()), missing))


def evaluate_command(arguments: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Evaluate as a YAML file says, or `say` one table of the results of several evaluations.

    Raises:
        UserError: the configuration, the data or the machine is at fault.
    """
    parser = _parser("evaluate.py", "Evaluate a model, a folder of images, or (watch=true) a run as it trains.")
    parser.add_argument(
        "--table", nargs="+", metavar="FOLDER", help="print one table of the results in these output folders, and end"
    )
    options = parser.parse_intermixed_args(list(arguments))
    if options.table is not None:
        if is_first_rank():
            _show_results([one for one in (options.config, *options.table) if one is not None], say)
        return
    if options.config is None:
        parser.error("name the configuration of the evaluation, such as yamls/evaluate.yaml")
    config = load_complete(EvaluationConfig, options.config, options.overrides)
    check_sections(config)
    _start_logging()
    if config.watch:
        from diffusion.evaluation.watch import watch

        watch(config)
        return
    from diffusion.evaluation.evaluate import evaluate

    evaluate(config)
    if is_first_rank():
        _show_results([config.output_folder], say)


def _show_results(folders: Sequence[str], say: Callable[[str], None]) -> None:
    from diffusion.evaluation.protocol import read_results, table

    say(table(read_results([Path(folder).expanduser() for folder in folders])))
