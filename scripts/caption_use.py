"""Measure caption use: a run's validation loss with true and with shuffled captions, over several seeds."""

from statistics import mean

from diffusion.config.frozen import add_model, frozen_paths
from diffusion.launch import CommandParser, choose_device, positive, run_command
from diffusion.reports.tables import text_table


def main() -> None:
    """Measure and print."""
    parser = CommandParser(description=__doc__)
    add_model(parser, help_text="checkpoint or run folder, with validation data in its configuration")
    parser.add_argument("--seeds", type=positive, default=3, help="evaluation seeds")
    parser.add_argument("--device", default=None, help="cpu, cuda ...; default: a GPU if available")
    arguments = parser.parse_args()

    from diffusion.checkpointing.find import resolve_checkpoint
    from diffusion.datasets.loader import validation_loader
    from diffusion.evaluation.validation_loss import measure_caption_use, open_validation_data
    from diffusion.loading import load_config_of, load_model

    device = choose_device(arguments.device)
    checkpoint = resolve_checkpoint(arguments.checkpoint)
    config = load_config_of(checkpoint)
    model = load_model(checkpoint, weights=arguments.weights, paths=frozen_paths(arguments)).to(device)
    dataset = open_validation_data(config, model)
    assert config.validation is not None
    batches = validation_loader(dataset, config.validation, config.data)
    losses = measure_caption_use(model, batches, range(arguments.seeds))
    columns = {"seed": range(arguments.seeds), **losses}
    rows = [(str(seed), *(f"{loss:.5f}" for loss in found)) for seed, *found in zip(*columns.values(), strict=True)]
    print(f"{checkpoint}: loss of {len(dataset)} validation images, by captions")
    print("\n".join(text_table([tuple(columns), *rows])))
    gains = [shuffled - true for true, shuffled in zip(losses["true"], losses["shuffled"], strict=True)]
    spread = max(gains) - min(gains)
    print(f"the loss is {mean(gains):.5f} lower with the true captions; range over the seeds: {spread:.5f}")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
