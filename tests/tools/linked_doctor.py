"""`scripts/doctor.py` on nodes of a rank each, joined by a switch: `linked_doctor.py SWITCH doctor.py ARGUMENTS`."""

import os
import runpy
import socket
import sys

from diffusion.operations.checks import doctor
from diffusion.operations.checks.nodes import DeviceSpeed
from tests.tools.hosts import Network, enter

RANK = os.environ["RANK"]
SWITCH = sys.argv[1]

enter(Network.namespace(SWITCH, int(RANK)))
os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR=Network.address(0))
socket.gethostname = lambda: f"n{RANK}"
doctor.LINK_BYTES = 2**21  # The cables are slow, for which busy cores matter less.
doctor.measure_device = lambda device: DeviceSpeed(
    name="", datasheet_flops=None, matmul_flops=1e12, copy_bytes_per_second=1e12
)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
