"""`scripts/doctor.py` on two nodes of a rank each, of which the second is stopped (SIGSTOP) while it measures."""

import os
import runpy
import signal
import sys

from diffusion.operations.checks import doctor
from diffusion.operations.checks.nodes import DeviceSpeed


def measure(device: object) -> DeviceSpeed:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    return DeviceSpeed(name="", datasheet_flops=None, matmul_flops=1e12, copy_bytes_per_second=1e12)


os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
doctor.measure_device = measure
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
