import errno
import json
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from composer import Event

from diffusion.callbacks.monitoring import Heartbeat
from diffusion.formats.run_folder import LEASE
from diffusion.operations import timeouts
from diffusion.operations.heartbeats import HeartbeatFile, Phase, read_heartbeats
from diffusion.operations.lease import leased
from tests.tools.waiting import wait_until


def test_compilation_within_a_step_is_a_phase_of_its_own(tmp_path):
    found: list[Phase] = []

    def phase() -> Phase:
        (beat,) = read_heartbeats(tmp_path)
        return beat.phase

    def look(graph, inputs):
        found.append(phase())
        return graph.forward

    state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=3)))
    logger: Any = None
    torch._dynamo.reset()
    with leased(tmp_path) as lease, Heartbeat(tmp_path, lease) as heartbeat:
        run = torch.compile(lambda x: x + 1, backend=look, dynamic=False)
        heartbeat.run_event(Event.AFTER_DATALOADER, state, logger)
        for size in (1, 2, 3, 3):
            run(torch.ones(size))
            assert phase() is Phase.step
        heartbeat.run_event(Event.EVAL_START, state, logger)
        run(torch.ones(4))
        assert phase() is Phase.evaluation
    assert found == [Phase.compiling] * 3 + [Phase.evaluation]
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    assert phase() is Phase.ended


def test_the_error_of_a_run_is_stored_without_secrets(tmp_path):
    with suppress(ValueError), leased(tmp_path) as lease, Heartbeat(tmp_path, lease):
        raise ValueError("sftp://me:planted@host/x")
    (beat,) = read_heartbeats(tmp_path)
    assert beat.error == "ValueError: sftp://***@host/x"


def test_the_lease_is_renewed_while_the_heartbeat_does_not_reach_the_disk(tmp_path, monkeypatch):
    num_failures = 0

    def fail(file: HeartbeatFile) -> None:
        nonlocal num_failures
        num_failures += 1
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(HeartbeatFile, "sync", fail)
    monkeypatch.setattr(timeouts, "RENEWAL", 0.01)
    with leased(tmp_path) as lease, Heartbeat(tmp_path / "beats", lease):
        wait_until(lambda: num_failures >= 3, "the lease is not renewed")
        assert json.loads((tmp_path / LEASE).read_text())["count"] >= 2
