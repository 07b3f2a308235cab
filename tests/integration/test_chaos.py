"""Real training under supervision, with faults: it reaches its end by itself, and equals an undisturbed run."""

import pytest

from diffusion.operations.events import read_events
from tests.tools.training_runs import SMALL_UNET

pytestmark = pytest.mark.slow

FAULTS = ["poison", "kill_rank", "truncate_checkpoint", "freeze"]


@pytest.mark.world_size(2)
def test_a_supervised_run_recovers_from_faults_and_equals_an_undisturbed_one(server, tmp_path):
    command = ["tests/tools/chaos.py", "--faults", "4", "--kinds", *FAULTS, "--out", str(tmp_path / "out")]
    command += ["--server", str(server.address)]
    patience = ["operations.supervision.hang_floor=40", "data.download_timeout=60"]
    job = server.command(0, [*command, SMALL_UNET, *patience])
    assert "4 faults: draws, losses and weights of all " in job.output
    rows = [line.split(" | ") for line in job.output.splitlines() if line.startswith("| ")]
    recovered = {cells[0].removeprefix("| "): cells for cells in rows if len(cells) > 3}
    assert set(FAULTS) < set(recovered)
    assert all(int(recovered[kind][2]) > 0 for kind in ("poison", "truncate_checkpoint")), "steps are repeated"

    run = tmp_path / "out" / "disturbed"
    events = read_events(run)
    names = [event["event"] for event in events]
    assert names.count("started") == len(FAULTS) + 1
    assert names.count("rolling_back") == 1
    assert names[-1] == "finished"
    (hang,) = [event for event in events if event["event"] == "hang" and "was stopped" in event["reason"]]
    stacks = (run / hang["stacks"]).read_text()
    for rank in (0, 1):
        part = stacks.partition(f"rank {rank}, in phase")[2].partition("\nrank ")[0]
        assert "_train_loop" in part, stacks


def test_an_unknown_fault_is_rejected(server, tmp_path):
    job = server.start(0, ["tests/tools/chaos.py", "--kinds", "earthquake", "--out", str(tmp_path)]).finish()
    assert job.codes == [2]
    assert "--kinds earthquake: on this machine there are kill_rank," in job.output
