"""Serve a demo page of a run's model: python scripts/demo_page.py RUN, then open the printed address."""

import argparse

from diffusion.launch import CommandParser, choose_device, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description="Serve a demo page of a run's model. Ctrl-C ends it.")
    parser.add_argument(
        "model",
        help="checkpoint, run folder or its `checkpoints` folder (newest checkpoint), or a file of averaged weights",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        default=["raw", "ema"],
        help="weights to compare. raw: training weights; ema: their average; decay-0.999: one of several averages",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no password")
    parser.add_argument("--port", type=int, help="default: the first free port from 7860")
    parser.add_argument("--device", default=None, help="cpu, cuda ...; default: a GPU if available")
    return parser.parse_args()


def main() -> None:
    """Load and serve."""
    arguments = parse_arguments()
    from diffusion.demo_page import build_page, open_page
    from diffusion.loading import load_model

    device = choose_device(arguments.device)
    models = {}
    for weights in arguments.weights:
        models[weights] = load_model(arguments.model, weights=weights)
        models[weights].to(device)
    page = build_page(models, title=arguments.model)
    print(f"{open_page(page, arguments.host, arguments.port)} (Ctrl-C ends it)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    raise SystemExit(run_command(main))
