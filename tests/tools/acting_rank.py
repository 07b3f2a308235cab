"""A job of two ranks that acts like training, without its imports: `acting_rank.py BEATS ACTS`.

ACTS is a JSON list; each start takes the first act away and does it.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from diffusion.operations.hang_detection import STACKS_SIGNAL
from diffusion.operations.heartbeats import HeartbeatFile, HeartbeatRecord, Phase, read_heartbeats, stacks_file

NUM_RANKS = 2


def beat(rank: int, step: int, phase: Phase, **more) -> HeartbeatRecord:
    values = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "count": step,
        "num_done": max(0, step),
        "time": time.time(),
    }
    return HeartbeatRecord(rank=rank, step=step, phase=phase, median_step=0.01, **values, **more)


def wait_in_a_collective(say: Callable[[], None]) -> None:
    """Write the heartbeat here: who has read it finds this on the stack."""
    say()
    while True:
        time.sleep(0.05)


def work(say: Callable[[], None]) -> None:
    """Change what is on the stack all the time, from the heartbeat on."""
    say()
    while True:
        for depth in range(40):
            descend(depth)


def descend(depth: int) -> int:
    return descend(depth - 1) + 1 if depth else sum(range(50))


def act(folder: Path, rank: int, script: dict) -> int:
    stacks = stacks_file(folder, rank).open("w")
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    for _ in range(script.get("threads", 0)):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    file = HeartbeatFile(folder, rank)
    file.write(beat(rank, -1, Phase.starting))
    while len(read_heartbeats(folder)) < NUM_RANKS:
        time.sleep(0.01)

    def say() -> None:
        file.write(beat(rank, script["step"], Phase(script["phase"])))

    if script.get("works"):
        work(say)
    if script.get("waits"):
        wait_in_a_collective(say)
    say()
    if "error" in script:
        end = {"code": script["code"], "error": script["error"], "is_lasting": script.get("is_lasting", False)}
        file.write(beat(rank, script["step"], Phase.ended, **end))
    while script.get("lingers"):
        time.sleep(0.05)
    return script["code"]


def main() -> None:
    folder, script = Path(sys.argv[1]), Path(sys.argv[2])
    acts = json.loads(script.read_text())
    script.write_text(json.dumps(acts[1:]))
    other = os.fork()
    code = act(folder, 1 if other == 0 else 0, acts[0])
    if other:
        os.waitpid(other, 0)
    sys.exit(code)


if __name__ == "__main__":
    main()
