"""Run a blind preference study: python scripts/preference.py serve A=FOLDER B=FOLDER --prompts FILE."""

import argparse
import importlib.util
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
    serve = commands.add_parser("serve", help="show raters pairs of images on a web page and store their votes")
    serve.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="images as scripts/generate.py writes them")
    serve.add_argument("--prompts", type=Path, required=True, help=".txt, one per line; .tsv with Prompt and Category")
    serve.add_argument("--votes", type=Path, required=True, help="SQLite file on a local disk; continued if it exists")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    serve.add_argument("--port", type=int, default=8000, help="0: a free one")
    serve.add_argument("--token", help="required in links; random if the host is not loopback")
    serve.add_argument("--raters", nargs="+", default=[], metavar="NAME", help="also print a personal link for each")
    serve.add_argument("--max-raters", type=positive, default=200, help="largest number of raters")
    serve.add_argument("--seed", type=int, default=17, help="of sides, order and attention checks")
    serve.add_argument("--pairs", type=int, default=50, help="pairs per rater")
    serve.add_argument("--repeats", type=int, default=5, help="pairs shown to a rater again, sides exchanged")
    serve.add_argument("--checks", type=int, default=4, help="attention checks per rater")
    report = commands.add_parser("report", help="rates with intervals, agreement and a figure, as HTML, PNG and JSON")
    report.add_argument("votes", type=Path)
    report.add_argument("--out", type=Path, required=True, help="folder")
    report.add_argument("--keep-all", action="store_true", help="keep raters who failed attention checks")
    report.add_argument("--max-failed", type=float, default=0.25, help="largest share of failed checks")
    report.add_argument("--seed", type=int, default=17, help="of the bootstrap")
    export = commands.add_parser("export", help="all votes as CSV")
    export.add_argument("votes", type=Path)
    export.add_argument("--out", type=Path, help="file; default: standard output")
    return parser.parse_args()


def main() -> None:
    """Run one of the commands."""
    arguments = parse_arguments()
    {"serve": serve, "report": report, "export": export}[arguments.command](arguments)


def serve(arguments: argparse.Namespace) -> None:
    """Answer raters until the command is ended."""
    _require("flask", "waitress")
    from diffusion.evaluation.preference.images import collect
    from diffusion.evaluation.preference.server import LOOPBACK, LOOPBACK_NAMES, RATER, Site, open_server
    from diffusion.evaluation.preference.store import Settings, Store

    for option in ("pairs", "repeats", "checks"):
        value, least = getattr(arguments, option), int(option == "pairs")
        if value < least:
            raise ConfigurationError(f"--{option} {value}: must be {least} or more")
    if wrong := [name for name in arguments.raters if not RATER.fullmatch(name)]:
        raise ConfigurationError(f"--raters {wrong[0]}: a name has 1 to 64 letters, digits or _ . @ -")
    images = collect(_folders(arguments.models), arguments.prompts)
    settings = Settings(
        seed=arguments.seed,
        num_pairs=arguments.pairs,
        num_repeats=arguments.repeats,
        num_checks=arguments.checks,
    )
    store = Store.create_or_continue(arguments.votes, images, settings)
    is_local = arguments.host in LOOPBACK
    token = arguments.token or (None if is_local else secrets.token_urlsafe(16))
    site = Site(
        store=store,
        images=images,
        token=token,
        hosts=LOOPBACK_NAMES if token is None else None,
        max_raters=arguments.max_raters,
    )
    server, port = open_server(site, arguments.host, arguments.port)
    host = socket.gethostname() if arguments.host in ("0.0.0.0", "::") else arguments.host
    host = f"[{host}]" if ":" in host else host
    given = {"token": token} if token else {}
    print(f"{len(images.pairs)} pairs of {len(images.models)} models; {store.num_presentations} screens per rater")
    for name in arguments.raters:
        print(f"link for {name}: http://{host}:{port}/?{urlencode(given | {'rater': site.signed(name)})}")
    print(f"link for raters: http://{host}:{port}/{'?' * bool(given)}{urlencode(given)}", flush=True)
    server.run()


def _require(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MachineError(f"scripts/preference.py needs the package {package}: pip install -e '.[evaluation]'")


def _folders(arguments: list[str]) -> dict[str, Path]:
    folders: dict[str, Path] = {}
    for argument in arguments:
        name, separator, folder = argument.partition("=")
        if not separator or not name.strip() or not folder:
            raise ConfigurationError(f"{argument}: a model is given as NAME=FOLDER")
        if name in folders:
            raise ConfigurationError(f"{argument}: there is a model {name} already")
        folders[name.strip()] = Path(folder)
    return folders


def report(arguments: argparse.Namespace) -> None:
    """Write the report."""
    _require("choix", "krippendorff")
    from diffusion.evaluation.preference.report import make_report, write_report
    from diffusion.evaluation.preference.store import Store

    if not 0 <= arguments.max_failed <= 1:
        raise ConfigurationError(f"--max-failed {arguments.max_failed}: is a share, 0 to 1")
    store = Store.open(arguments.votes)
    max_failed = 1.0 if arguments.keep_all else arguments.max_failed
    result = make_report(store.votes(), store.models, max_failed=max_failed, seed=arguments.seed)
    write_report(result, arguments.out)
    print(f"{result.num_votes} votes of {result.num_raters} raters: {arguments.out / 'index.html'}")


def export(arguments: argparse.Namespace) -> None:
    """Write all votes as CSV."""
    _require("choix", "krippendorff")
    from diffusion.evaluation.preference.report import to_csv
    from diffusion.evaluation.preference.store import Store

    store = Store.open(arguments.votes)
    text = to_csv(store.votes(), store.models)
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.write_text(text, encoding="utf-8", newline="")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
