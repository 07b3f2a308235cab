"""`scripts/doctor.py` on two nodes of a rank each, of which the second is stopped (SIGSTOP) while it measures."""

import os
import runpy
import signal
import sys

from diffusion.operations.checks import ranks
from diffusion.operations.checks.device import DeviceSpeed


def measure(device: object) -> DeviceSpeed:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return DeviceSpeed(name="", datasheet_flops=None, matmul_flops=1e12, copy_bytes_per_second=1e12)


os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=os.environ["RANK"])
ranks.measure_device = measure
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
