"""Serve a demo page of a run's model: python scripts/demo_page.py RUN, then open the printed address."""

from contextlib import suppress
from pathlib import Path

from diffusion.config.frozen import add_model, frozen_paths
from diffusion.errors import DataError
from diffusion.launch import CommandParser, choose_device, port, positive, run_command


def main() -> None:
    """Load and serve."""
    parser = CommandParser(description="Serve a demo page of a run's model. Ctrl-C ends it.")
    add_model(parser, compares=True)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; others need --login-file")
    parser.add_argument("--port", type=port, help="default, or 0: the first free port from 7860")
    parser.add_argument("--device", default=None, help="cpu, cuda ...; default: a GPU if available")
    parser.add_argument("--login-file", type=Path, help="file with a line NAME:PASSWORD, which visitors have to give")
    parser.add_argument("--max-side", type=positive, help="largest height and width; default: twice the resolution")
    parser.add_argument("--max-steps", type=positive, default=200, help="largest number of sampling steps")
    parser.add_argument("--max-images", type=positive, default=16, help="largest number of images of each model")
    arguments = parser.parse_args()

    from diffusion.demo_page import build_page, check_host, open_page, read_login
    from diffusion.ema.posthoc import AVERAGE_SUFFIX
    from diffusion.loading import load_model

    login = read_login(arguments.login_file) if arguments.login_file is not None else None
    check_host(arguments.host, login)
    device = choose_device(arguments.device)
    file = Path(arguments.checkpoint)
    is_average = file.suffix == AVERAGE_SUFFIX
    labels = [file.stem] if is_average else arguments.weights or ["raw"]
    paths = frozen_paths(arguments)
    models = {label: load_model(arguments.checkpoint, weights=label, paths=paths) for label in labels}
    if arguments.weights is None and not is_average:
        with suppress(DataError):  # The run has no average, or none yet.
            models["ema"] = load_model(arguments.checkpoint, weights="ema", paths=paths)
    for model in models.values():
        model.to(device)
    page = build_page(
        models,
        title=next(iter(models.values())).name,
        max_side=arguments.max_side,
        max_steps=arguments.max_steps,
        max_images=arguments.max_images,
    )
    print(f"{open_page(page, arguments.host, arguments.port or None, login)} (Ctrl-C ends it)", flush=True)
    page.block_thread()


if __name__ == "__main__":
    raise SystemExit(run_command(main))
