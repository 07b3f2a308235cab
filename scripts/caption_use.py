"""Does a run's model use its captions? Held-out loss with true and with shuffled captions, over several seeds."""

import argparse
import json

from diffusion.launch import CommandParser, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("checkpoint", help="checkpoint or run folder; its configuration names the held-out data")
    parser.add_argument("--weights", choices=["raw", "ema"], default="raw")
    parser.add_argument("--seeds", type=int, default=3, help="evaluation seeds")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    from diffusion.checkpointing.find import resolve_checkpoint
    from diffusion.config.model import Posterior
    from diffusion.datasets.loader import validation_dataset, validation_loader
    from diffusion.errors import ConfigurationError
    from diffusion.evaluation.caption_use import measure_caption_use
    from diffusion.loading import load_config_of, load_model
    from diffusion.models.tokenizers import tokenize

    checkpoint = resolve_checkpoint(arguments.checkpoint)
    config = load_config_of(checkpoint)
    if config.validation is None:
        raise ConfigurationError(f"the run of {checkpoint} has no held-out data (validation)")
    config.data.num_workers = 0
    model = load_model(checkpoint, weights=arguments.weights)
    dataset = validation_dataset(
        config.validation,
        config.data,
        tokenize=lambda captions: tokenize(model.tokenizer, captions),
        with_logvar=config.objective.posterior == Posterior.sample,
    )
    batches = validation_loader(dataset, config.validation, config.data)
    use = measure_caption_use(model, batches, range(arguments.seeds))
    row = {"checkpoint": str(checkpoint), "num_samples": len(dataset), "true": use.true, "shuffled": use.shuffled}
    print(json.dumps(row))
    print(f"with the true captions the loss is {use.gain:.5f} lower; over the seeds that varies by {use.spread:.5f}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
