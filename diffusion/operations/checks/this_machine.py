"""A quick check of this machine by itself: its GPUs, its kernel's log, and the disk for checkpoints.

It builds no model, opens no data and asks no other rank, so it takes seconds and can be made before each start.

    python -m diffusion.operations.checks.this_machine CONFIG.yaml [key.sub=value ...]

writes what was found as one line of JSON, which `diffusion.operations.checks.hosts` reads.
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
from diffusion.operations.checks.device import measure_machine
from diffusion.operations.checks.gpus import check_faults, read_gpus
from diffusion.operations.checks.kernel_log import check_xids, parse_xids, read_kernel_log
from diffusion.operations.checks.nodes import NodeReading
from diffusion.operations.checks.readings import checkpoint_folder, measure_write_speed
from diffusion.operations.checks.verdicts import Verdict, ok, problem, size_text, to_json


def check_this_machine(config: Config) -> tuple[NodeReading, list[Verdict]]:
    """Check this machine.

    What it has is not compared with what the run needs, which the run does itself when it starts: so this may run on
    a machine that only starts the job elsewhere.

    Args:
        config: says where checkpoints go, and whether GPUs matter.

    Returns:
        What it is compared with other machines by, and what was found. Only GPUs are compared: the speed of cores
        and of a disk that others use, too, depends on what else they do at the moment.
    """
    host, num_gpus = socket.gethostname(), torch.cuda.device_count()
    folder = checkpoint_folder(config)
    try:
        verdicts = [ok("output folder", f"{folder} is written at {size_text(measure_write_speed(folder))}/s")]
    except OSError as error:
        remedy = "free space, or choose another output_folder (or trainer.checkpoint_folder)"
        verdicts = [problem("output folder", f"{folder} cannot be written to: {error.strerror}", remedy)]
    if resolve_device(config.trainer.device, num_gpus) is not Device.gpu:
        return NodeReading(name=host, host=host, num_gpus=0), verdicts
    log = read_kernel_log()
    verdicts.append(check_xids(parse_xids(log) if log is not None else None))
    verdicts += [verdict for gpu in read_gpus() for verdict in check_faults(gpu)]
    measured = [measure_machine(torch.device("cuda", number)) for number in range(num_gpus)]
    reading = NodeReading(
        name=host,
        host=host,
        num_gpus=num_gpus,
        flops=min((one.matmul_flops for one in measured), default=None),
        copied=min((one.copy_bytes_per_second for one in measured), default=None),
    )
    return reading, verdicts


def main() -> None:
    """Check, and write down what was found."""
    reading, verdicts = check_this_machine(load_config(sys.argv[1], sys.argv[2:]))
    sys.stdout.write(json.dumps({"reading": asdict(reading), "verdicts": to_json(verdicts)}) + "\n")


if __name__ == "__main__":
    sys.exit(run_command(main))
