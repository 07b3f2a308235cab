"""The command `run.py`: from a YAML file to a training run, or with `--dry-run` to its plan."""

from collections.abc import Callable, Sequence

from diffusion.config.checks import check, is_location, missing_locations
from diffusion.config.loading import load_config, to_yaml
from diffusion.config.schema import Config, Task
from diffusion.launch import CommandParser, rank, world_size


def train_command(arguments: Sequence[str], *, say: Callable[[str], None]) -> None:
    """Train as a YAML file says. The same command again continues the run.

    Args:
        arguments: the command line, without the program's name.
        say: where the plan of a dry run goes.

    Raises:
        UserError: the configuration, the data or the machine is at fault.
    """
    parser = CommandParser(prog="run.py", description="Train a text-to-image model. Started again, a run continues.")
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="values that replace those of the file")
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved configuration and the plan, and train nothing"
    )
    options = parser.parse_intermixed_args(list(arguments))
    if options.config is None:
        parser.error("name the configuration of the run, such as yamls/phase1.yaml")
    config = load_config(
        options.config, options.overrides, may_miss=is_location if options.dry_run else lambda key: False
    )
    check(config, world_size=(config.plan.num_gpus if options.dry_run else None) or world_size())
    if options.dry_run:
        if rank() == 0:
            _show_plan(config, say)
        return
    from diffusion.train import train

    train(config)


def _show_plan(config: Config, say: Callable[[str], None]) -> None:
    from diffusion.models import count_parameters
    from diffusion.models.architectures import ARCHITECTURES
    from diffusion.planning.plan import make_plan
    from diffusion.planning.plan_text import format_plan

    num_ranks = config.plan.num_gpus or world_size()
    check(config, world_size=num_ranks, vae_factor=ARCHITECTURES[config.model.architecture].vae_factor)
    trained = "vae" if config.task is Task.autoencoder else "unet"
    plan = make_plan(
        config,
        num_parameters=count_parameters(config.model)[trained],
        world_size=world_size(),
        missing=missing_locations(config),
    )
    say(to_yaml(config))
    say(format_plan(plan))
