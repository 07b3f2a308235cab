"""Evaluate: `python evaluate.py yamls/evaluate.yaml [key.sub=value ...]`; also with composer or torchrun."""

import sys

from diffusion.cli import evaluate_command
from diffusion.launch import run_command

if __name__ == "__main__":
    sys.exit(run_command(lambda: evaluate_command(sys.argv[1:], say=print)))
