"""Checks of this machine before a start: seconds, without model, data and other ranks.

    python -m diffusion.operations.checks.this_machine CONFIG.yaml [key.sub=value ...]

prints the results as one line of JSON, which `diffusion.operations.hosts` reads. They do not depend on the demand of
the run, which checks that itself, so this also suits a machine that only starts the job elsewhere.
"""

import json
import socket
import sys
from dataclasses import asdict

import torch

from diffusion.config.checks import resolve_device
from diffusion.config.loading import load_config
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.launch import run_command
from diffusion.operations.checks import gpu, machine
from diffusion.operations.checks.check import Job, Stage, run_checks
from diffusion.operations.checks.device import measure_device
from diffusion.operations.checks.nodes import NodeSpeed
from diffusion.operations.checks.verdicts import Verdict, to_json


def check_this_machine(config: Config) -> tuple[NodeSpeed, list[Verdict]]:
    """Check this machine.

    Only GPUs are measured: the speed of cores and shared disks depends on their load at the moment.

    Args:
        config: names the folder of checkpoints and the device of training.

    Returns:
        Measurements for the comparison with other machines, and verdicts.
    """
    host, num_gpus = socket.gethostname(), torch.cuda.device_count()
    device = resolve_device(config.trainer.device, num_gpus)
    verdicts = run_checks([*machine.CHECKS, *gpu.CHECKS], Job(config=config, device=device), Stage.host)
    if device is not Device.gpu:
        return NodeSpeed(name=host, host=host, num_gpus=0), verdicts
    speeds = [measure_device(torch.device("cuda", number)) for number in range(num_gpus)]
    speed = NodeSpeed(
        name=host,
        host=host,
        num_gpus=num_gpus,
        flops=min((speed.matmul_flops for speed in speeds), default=None),
        copied=min((speed.copy_bytes_per_second for speed in speeds), default=None),
    )
    return speed, verdicts


def main() -> None:
    """Print the results."""
    speed, verdicts = check_this_machine(load_config(sys.argv[1], sys.argv[2:]))
    sys.stdout.write(json.dumps({"reading": asdict(speed), "verdicts": to_json(verdicts)}) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
