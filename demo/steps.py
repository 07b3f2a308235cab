"""Commands one after the other; those that are done are not done again."""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from diffusion.errors import UserError
from diffusion.files import write_json

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
QUICK = [
    "trainer.max_duration=6ba",
    "trainer.eval_interval=3ba",
    "schedule.warmup=2ba",
    "validation.num_samples=32",
]
"""Overrides of a training of a few steps."""


class Steps:
    """Runs commands and remembers how long they took.

    Args:
        out: folder of everything that the commands write; exists.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.log = out / "steps.json"
        self.done: dict[str, dict] = json.loads(self.log.read_text()) if self.log.is_file() else {}

    def run(self, name: str, command: list[str]) -> None:
        """Run a command from the repository's root, unless it was done.

        Raises:
            UserError: it fails, or another command has done this step here.
        """
        shown = shlex.join(Path(word).name if word.startswith(str(BIN)) else word for word in command)
        if name in self.done:
            if self.done[name]["command"] != shown:
                raise UserError(
                    f"{self.out}: step '{name}' was done by another command ({self.done[name]['command']}): remove the "
                    "folder, or give another one with --out"
                )
            print(f"[{name}] done before", flush=True)
            return
        print(f"\n[{name}] {shown}", flush=True)
        start = time.monotonic()
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "TQDM_MININTERVAL": "2"}
        if code := subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode:
            raise UserError(f"step '{name}' ended with exit code {code}; see its message, and run the demo again")
        self.done[name] = {"command": shown, "seconds": time.monotonic() - start}
        write_json(self.log, self.done)

    def draw(self, num_images: int, shares: Sequence[str]) -> tuple[list[str], Path]:
        """Draw images with captions and prepare them; return the folders of the three layouts, and of the data set."""
        source, prepared = self.out / "source", self.out / "prepared"
        options = ["--num-images", str(num_images), "--shares", *shares]
        self.run("draw", [sys.executable, "-m", "demo.shapes", str(source), *options])
        layouts = [str(source / layout) for layout in ("images", "webdataset", "parquet")]
        options = ["--edges", "32", "64", "--validation-fraction", "0.05", "--workers", "2"]
        self.run("prepare", [sys.executable, "scripts/prepare.py", *layouts, str(prepared), *options])
        return layouts, prepared
