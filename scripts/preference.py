"""Run a blind preference study: python scripts/preference.py serve A=FOLDER B=FOLDER --prompts FILE --votes FILE."""

import argparse
import secrets
import socket
import sys
from pathlib import Path
from urllib.parse import urlencode

from diffusion.errors import ConfigurationError, MachineError
from diffusion.launch import CommandParser, positive, run_command


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description="Run a blind preference study of two or more models.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("serve", help="show raters pairs of images on a web page and store their votes")
    command.set_defaults(run=serve)
    command.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="images as scripts/generate.py writes them")
    command.add_argument(
        "--prompts", type=Path, required=True, help=".txt, one per line; .tsv with Prompt and Category"
    )
    command.add_argument(
        "--votes", type=Path, required=True, help="SQLite file on a local disk; continued if it exists"
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    command.add_argument("--port", type=int, default=8000, help="0: a free one")
    command.add_argument("--token", help="required in links; random if the host is not loopback")
    command.add_argument("--raters", nargs="+", default=[], metavar="NAME", help="also print a personal link for each")
    command.add_argument("--seed", type=int, default=17, help="seed of sides, order and attention checks")
    command.add_argument("--pairs", type=positive, default=50, help="pairs per rater")
    command.add_argument("--repeats", type=int, default=5, help="pairs shown to a rater again, sides exchanged")
    command.add_argument("--checks", type=int, default=4, help="attention checks per rater")
    command = commands.add_parser("report", help="rates with intervals, agreement and a figure, as HTML, PNG and JSON")
    command.set_defaults(run=report)
    command.add_argument("votes", type=Path)
    command.add_argument("--out", type=Path, required=True, help="folder")
    command.add_argument(
        "--max-failed", type=float, default=0.25, help="largest share of failed checks; 1: keep all raters"
    )
    command.add_argument("--seed", type=int, default=17, help="seed of the bootstrap")
    command = commands.add_parser("export", help="all votes as CSV")
    command.set_defaults(run=export)
    command.add_argument("votes", type=Path)
    command.add_argument("--out", type=Path, help="file; default: standard output")
    return parser.parse_args()


def serve(arguments: argparse.Namespace) -> None:
    """Answer raters until the command is ended."""
    from diffusion.evaluation.preference.images import collect
    from diffusion.evaluation.preference.server import LOOPBACK, open_server, personal_name
    from diffusion.evaluation.preference.store import Settings, Store

    images = collect(read_folders(arguments.models), arguments.prompts)
    settings = Settings(
        seed=arguments.seed,
        num_pairs=arguments.pairs,
        num_repeats=arguments.repeats,
        num_checks=arguments.checks,
    )
    store = Store.create_or_continue(arguments.votes, images, settings)
    token = arguments.token or (None if arguments.host in LOOPBACK else secrets.token_urlsafe(16))
    server, port = open_server(store, images, token=token, host=arguments.host, port=arguments.port)
    host = socket.gethostname() if arguments.host in ("0.0.0.0", "::") else arguments.host
    address = f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
    given = {"token": token} if token else {}
    print(f"{len(images.pairs)} pairs of {len(images.models)} models; {store.num_presentations} screens per rater")
    for name in arguments.raters:
        print(f"link for {name}: {address}?{urlencode({**given, 'rater': personal_name(store, name)})}")
    print(f"link for raters: {address}{'?' * bool(given)}{urlencode(given)}", flush=True)
    server.run()


def read_folders(arguments: list[str]) -> dict[str, Path]:
    """Folders by the names of the models, from NAME=FOLDER.

    Raises:
        ConfigurationError: an argument is not of that form, or a name is repeated.
    """
    folders: dict[str, Path] = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        if not name.strip() or not folder or name.strip() in folders:
            raise ConfigurationError(f"{argument}: a model is given as NAME=FOLDER, each name once")
        folders[name.strip()] = Path(folder)
    return folders


def report(arguments: argparse.Namespace) -> None:
    """Write the report."""
    from diffusion.evaluation.preference.report import make_report, write_report
    from diffusion.evaluation.preference.store import Store

    store = Store(arguments.votes)
    result = make_report(store.votes(), store.models, max_failed=arguments.max_failed, seed=arguments.seed)
    write_report(result, arguments.out)
    print(f"{result.num_votes} votes of {result.num_raters} raters: {arguments.out / 'index.html'}")


def export(arguments: argparse.Namespace) -> None:
    """Write all votes as CSV."""
    from diffusion.evaluation.preference.report import to_csv
    from diffusion.evaluation.preference.store import Store

    store = Store(arguments.votes)
    text = to_csv(store.votes(), store.models)
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.write_text(text, encoding="utf-8", newline="")


def main() -> None:
    """Run one of the commands."""
    arguments = parse_arguments()
    try:
        arguments.run(arguments)
    except ModuleNotFoundError as error:
        raise MachineError(f"scripts/preference.py needs {error.name}: pip install -e '.[evaluation]'") from error


if __name__ == "__main__":
    raise SystemExit(run_command(main))
