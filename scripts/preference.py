"""Run a blind preference study: python scripts/preference.py serve A=FOLDER B=FOLDER --prompts FILE --votes FILE."""

import argparse
import signal
import socket
import sys
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from diffusion.errors import ConfigurationError, MachineError, explained_writes
from diffusion.files import write_atomically
from diffusion.launch import LOOPBACK, CommandParser, output_file, port, positive, run_command, share, whole_number


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description="Run a blind preference study of two or more models.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("serve", help="show raters pairs of images on a web page and store their votes")
    command.set_defaults(run=serve)
    command.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="images as scripts/generate.py writes them")
    command.add_argument(
        "--prompts",
        type=Path,
        required=True,
        help=".txt, one per line; or .tsv, .csv, .jsonl, .json with prompt and category",
    )
    command.add_argument(
        "--votes", type=Path, required=True, help="SQLite file on a local disk; continued if it exists"
    )
    command.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    command.add_argument("--port", type=port, default=8000, help="0: a free one")
    command.add_argument(
        "--public-url", metavar="URL", help="https://... under which a proxy on this machine serves the page"
    )
    command.add_argument(
        "--raters",
        nargs="+",
        default=[],
        metavar="NAME",
        help="print a personal link for each; only these are answered",
    )
    command.add_argument("--seed", type=int, default=17, help="seed of sides, order and attention checks")
    command.add_argument("--pairs", type=positive, default=50, help="pairs per rater")
    command.add_argument(
        "--repeats", type=whole_number, default=5, help="pairs shown to a rater again, sides exchanged"
    )
    command.add_argument("--checks", type=whole_number, default=4, help="attention checks per rater")
    command = commands.add_parser("report", help="rates with intervals, agreement and a figure, as HTML, PNG and JSON")
    command.set_defaults(run=report)
    command.add_argument("votes", type=Path)
    command.add_argument("--out", type=Path, required=True, help="folder")
    command.add_argument(
        "--max-failed", type=share, default=0.25, help="largest share of failed checks; 1: keep all raters"
    )
    command.add_argument("--seed", type=whole_number, default=17, help="seed of the bootstrap")
    command = commands.add_parser("export", help="all votes as CSV")
    command.set_defaults(run=export)
    command.add_argument("votes", type=Path)
    command.add_argument("--out", type=output_file, help="file; default: standard output")
    return parser.parse_args()


def serve(arguments: argparse.Namespace) -> None:
    """Answer raters until the command is ended."""
    from apps.preference.images import collect
    from apps.preference.server import open_server, signed_name
    from apps.preference.store import Settings, Store

    if (arguments.host not in LOOPBACK or arguments.public_url) and not arguments.raters:
        raise ConfigurationError("a page that others can reach needs --raters NAME ...: each gets a personal link")
    check_public_url(arguments.public_url)
    images = collect(read_folders(arguments.models), arguments.prompts)
    settings = Settings(
        seed=arguments.seed,
        num_pairs=arguments.pairs,
        num_repeats=arguments.repeats,
        num_checks=arguments.checks,
    )
    store = Store.create_or_continue(arguments.votes, images, settings)
    secret = store.read_secret()
    server, port = open_server(
        store,
        images,
        secret=secret,
        raters=arguments.raters,
        host=arguments.host,
        port=arguments.port,
        public_url=arguments.public_url,
    )
    host = socket.gethostname() if arguments.host in ("0.0.0.0", "::") else arguments.host
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    url = (arguments.public_url or address).rstrip("/")
    print(f"{len(images.pairs)} pairs of {len(images.models)} models; {store.num_presentations} screens per rater")
    for name in arguments.raters:
        print(f"link for {name}: {url}/?{urlencode({'rater': signed_name(secret, name)})}")
    if not arguments.raters:
        print(f"link for raters: {url}/")
    print(f"listening on {address}/", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # The server returns.
    try:
        server.run()
    finally:
        store.close()


def check_public_url(url: str | None) -> None:
    """Reject an address with another scheme, without a host, or with a path."""
    try:
        parts = urlsplit(url or "https://none")
    except ValueError:  # An open bracket.
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
        raise ConfigurationError(
            f"--public-url {url}: give a scheme and a host without a path, as https://study.example"
        )


def read_folders(arguments: list[str]) -> dict[str, Path]:
    """Folders by the names of the models, from NAME=FOLDER, each name once."""
    folders: dict[str, Path] = {}
    for argument in arguments:
        name, _, folder = argument.partition("=")
        if not name.strip() or not folder or name.strip() in folders:
            raise ConfigurationError(f"{argument}: a model is given as NAME=FOLDER, each name once")
        folders[name.strip()] = Path(folder)
    return folders


def report(arguments: argparse.Namespace) -> None:
    """Write the report."""
    from apps.preference.report import make_report, write_report
    from apps.preference.store import Store

    store = Store(arguments.votes)
    result = make_report(store.votes(), store.models, max_failed=arguments.max_failed, seed=arguments.seed)
    with explained_writes(f"--out {arguments.out}", "Choose another folder"):
        write_report(result, arguments.out)
    print(f"{result.num_votes} votes of {result.num_raters} raters: {arguments.out / 'index.html'}")


def export(arguments: argparse.Namespace) -> None:
    """Write all votes as CSV."""
    from apps.preference.report import to_csv
    from apps.preference.store import Store

    votes = arguments.votes.resolve()
    beside = [votes.with_name(votes.name + ending) for ending in ("-wal", "-shm", ".secret")]
    if arguments.out is not None and arguments.out.resolve() in beside:
        raise ConfigurationError(f"--out {arguments.out} is a file of the study: choose another")
    store = Store(arguments.votes)
    text = to_csv(store.votes(), store.models)
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        with explained_writes(f"--out {arguments.out}"):
            write_atomically(arguments.out, text)


def main() -> None:
    """Run one of the commands."""
    arguments = parse_arguments()
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # `apps` lies beside the installed package.
    try:
        arguments.run(arguments)
    except ModuleNotFoundError as error:
        raise MachineError(f"scripts/preference.py needs {error.name}: uv pip install -e '.[evaluation]'") from error


if __name__ == "__main__":
    raise SystemExit(run_command(main))
