"""`scripts/doctor.py` on nodes of a rank each: `nodes_doctor.py SWITCH doctor.py ARGUMENTS`.

A switch joins the nodes. With "" in its place, the second node is stopped (SIGSTOP) while it measures. With "0 0 1"
these are the nodes of the ranks.
"""

import os
import runpy
import signal
import socket
import sys

from diffusion.operations.checks import doctor
from diffusion.operations.checks.nodes import DeviceSpeed
from tests.tools.hosts import Network, enter

RANK = int(os.environ["RANK"])
NODES = sys.argv[1].split() if " " in sys.argv[1] else []
SWITCH = "" if NODES else sys.argv[1]


def measure(device: object) -> DeviceSpeed:
    if RANK == 1 and not SWITCH and not NODES:
        os.kill(os.getpid(), signal.SIGSTOP)
    return DeviceSpeed(name="", datasheet_flops=None, matmul_flops=1e12, copy_bytes_per_second=1e12)


os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
if NODES:
    own = NODES[RANK]
    os.environ.update(LOCAL_RANK=str(NODES[:RANK].count(own)), LOCAL_WORLD_SIZE=str(NODES.count(own)))
if SWITCH:
    enter(Network.namespace(SWITCH, RANK))
    os.environ["MASTER_ADDR"] = Network.address(0)
    socket.gethostname = lambda: f"n{RANK}"
    doctor.LINK_BYTES = 2**21  # The cables are slow, for which busy cores matter less.
doctor.measure_device = measure
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
