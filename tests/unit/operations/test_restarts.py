"""What follows the end of a job."""

import pytest

from diffusion.config.operations import SupervisionConfig
from diffusion.operations.heartbeats import HeartbeatRecord, Phase
from diffusion.operations.restarts import Ending, Restarts
from diffusion.operations.supervisor import ending_of

SETTINGS = SupervisionConfig(max_restarts=3, first_pause=10, longest_pause=25)


def ending(code: int, step: int = -1, *, is_lasting: bool = False) -> Ending:
    return Ending(code=code, reason="it ended", step=step, is_lasting=is_lasting)


def said(rank: int, code: int, error: str, *, is_lasting: bool = False) -> HeartbeatRecord:
    return HeartbeatRecord(
        rank=rank,
        pid=1,
        host="",
        count=9,
        phase=Phase.ended,
        step=12,
        num_done=3,
        time=0.0,
        code=code,
        error=error,
        is_lasting=is_lasting,
    )


def test_a_crash_starts_again_after_pauses_that_double_until_there_is_progress():
    restarts = Restarts(SETTINGS)
    pauses = [restarts.after(ending(1, step), was_signalled=False).pause for step in (5, 5, 5, 8, 8)]
    assert pauses == [10, 20, 25, 10, 20]


def test_restarts_in_vain_have_an_end():
    restarts = Restarts(SETTINGS)
    decisions = [restarts.after(ending(1, 5), was_signalled=False) for _ in range(5)]
    assert [decision.starts_again for decision in decisions] == [True] * 4 + [False]
    assert decisions[-1].code == 1
    assert "3 consecutive restarts without a step after 5" in decisions[-1].reason


def test_a_preempted_job_starts_again_at_once_or_not_at_all():
    decision = Restarts(SETTINGS).after(ending(75, 5), was_signalled=False)
    assert (decision.starts_again, decision.pause) == (True, 0)
    decision = Restarts(SupervisionConfig(continue_preempted=False)).after(ending(75, 5), was_signalled=False)
    assert (decision.starts_again, decision.code) == (False, 75)


@pytest.mark.parametrize("code", [0, 75, 1])
def test_a_supervisor_that_was_signalled_to_end_does(code):
    decision = Restarts(SETTINGS).after(ending(code, 5), was_signalled=True)
    assert (decision.starts_again, decision.code) == (False, code)


def test_what_worked_before_is_tried_again_and_what_never_did_is_not():
    restarts = Restarts(SETTINGS)
    assert not restarts.after(ending(2), was_signalled=False).starts_again
    assert restarts.after(ending(2, 5), was_signalled=False).starts_again
    assert restarts.after(ending(2), was_signalled=False).starts_again
    assert not restarts.after(ending(2, is_lasting=True), was_signalled=False).starts_again


def test_the_end_is_told_by_the_ranks_where_the_launcher_does_not():
    crash, mistake = said(0, 1, "RuntimeError: lost a peer"), said(1, 2, "DataError: no shard", is_lasting=True)
    assert ending_of(1, [crash, mistake]) == Ending(code=2, reason="DataError: no shard", step=12, is_lasting=True)
    assert ending_of(1, [crash, said(1, 75, "PreemptedError: saved")]).code == 75
    assert ending_of(1, [crash]) == Ending(code=1, reason="RuntimeError: lost a peer", step=12)
    assert ending_of(137, []) == Ending(code=137, reason="exit code 137", step=-1)
    assert ending_of(0, [said(0, 0, "")]).code == 0
