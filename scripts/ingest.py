"""Follow a bucket or folder: prepare images as they are uploaded, and let a data set grow by them.

    python scripts/ingest.py prepare.yaml --queue https://sqs.REGION.amazonaws.com/ACCOUNT/NAME [key=value ...]
    python scripts/ingest.py prepare.yaml [key=value ...]

The YAML is that of scripts/prepare.py. With --queue, notifications of S3 say when objects have come; without, the
sources are listed every --poll. What fails --attempts times is in OUT/dead_letters.jsonl. The same command continues
after a kill. SIGTERM ends it with exit code 0.
"""

import argparse
import logging
import signal
from collections.abc import Sequence
from typing import Any

from diffusion.launch import CommandParser, duration, existing_file, positive, run_command

logger = logging.getLogger("diffusion.ingest")


class Terminated(BaseException):
    """SIGTERM."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    parser.add_argument("config", type=existing_file, metavar="YAML", help="of a preparation")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the YAML's keys")
    parser.add_argument("--queue", metavar="URL", help="queue of SQS with the notifications of the bucket")
    parser.add_argument("--interval", type=duration, default="10m", metavar="TIME", help="from the first new object to "
                        "the append (default: 10m)")  # fmt: skip
    parser.add_argument("--size", type=positive, default=1024, metavar="MIB", help="new objects in MiB that are "
                        "appended earlier (default: 1024)")  # fmt: skip
    parser.add_argument("--poll", type=duration, default="60s", metavar="TIME", help="between two looks; an object "
                        "is taken when both find it the same (default: 60s)")  # fmt: skip
    parser.add_argument("--attempts", type=positive, default=5, metavar="N", help="failures of an object, or "
                        "deliveries of a message, before it is a dead letter (default: 5)")  # fmt: skip
    parser.add_argument("--no-report", action="store_true", help="do not write report.html and report.json")
    return parser.parse_intermixed_args(arguments)


def main() -> None:
    """Ingest until SIGTERM."""

    def terminate(*_: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    options = parse_arguments()

    from diffusion.config.loading import load_complete
    from diffusion.preparation.config import PrepareConfig
    from diffusion.preparation.ingest import Ingestion
    from diffusion.preparation.notifications import Queue

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("diffusion").setLevel(logging.INFO)
    logging.getLogger("PIL").setLevel(logging.CRITICAL)  # Damaged files are in the table of rejections.
    signal.signal(signal.SIGTERM, terminate)
    try:
        Ingestion(
            load_complete(PrepareConfig, options.config, options.overrides),
            Queue(options.queue) if options.queue is not None else None,
            interval=options.interval,
            size=options.size * 2**20,
            poll=options.poll,
            attempts=options.attempts,
            report=not options.no_report,
        ).run()
    except Terminated:
        logger.info("SIGTERM: the ingestion ends; the same command continues it")


if __name__ == "__main__":
    raise SystemExit(run_command(main))
