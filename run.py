"""Train: `composer run.py yamls/phase1.yaml [key.sub=value ...] [--dry-run]`; also with python or torchrun."""

import sys

from diffusion.cli import train_command
from diffusion.launch import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: train_command(sys.argv[1:], say=print)))
