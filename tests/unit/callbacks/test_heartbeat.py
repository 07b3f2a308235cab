from types import SimpleNamespace
from typing import Any

import torch
from composer import Event

from diffusion.callbacks.monitoring import Heartbeat
from diffusion.operations.heartbeats import Phase, read_heartbeats
from diffusion.operations.lease import leased


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
