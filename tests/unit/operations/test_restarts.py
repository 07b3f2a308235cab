"""What follows the end of a job."""

from dataclasses import replace

from diffusion.config.operations import SupervisionConfig
from diffusion.operations.heartbeats import HeartbeatRecord, Phase
from diffusion.operations.supervisor import Ending, Restarts, ending_of

SETTINGS = SupervisionConfig(max_restarts=3, first_pause=10, longest_pause=25)


def ending(code: int, step: int = -1, *, is_lasting: bool = False) -> Ending:
    return Ending(code=code, reason="it ended", step=step, is_lasting=is_lasting)


def said(rank: int, code: int, error: str, *, is_lasting: bool = False) -> HeartbeatRecord:
    ended = {"code": code, "error": error, "is_lasting": is_lasting}
    return HeartbeatRecord(
        rank=rank, pid=1, host="", count=9, phase=Phase.ended, step=12, num_done=3, time=0.0, **ended
    )


def test_a_crash_starts_again_after_pauses_that_double_until_there_is_progress():
    restarts = Restarts(SETTINGS)
    pauses = [restarts.pause_after(ending(1, step))[0] for step in (5, 5, 5, 8, 8)]
    assert pauses == [10, 20, 25, 10, 20]


def test_restarts_in_vain_have_an_end():
    restarts = Restarts(SETTINGS)
    pauses, reasons = zip(*(restarts.pause_after(ending(1, 5)) for _ in range(5)), strict=True)
    assert [pause is None for pause in pauses] == [False] * 4 + [True]
    assert "3 consecutive restarts without a step after 5" in reasons[-1]


def test_a_preempted_job_starts_again_at_once_or_not_at_all():
    assert Restarts(SETTINGS).pause_after(ending(75, 5))[0] == 0
    assert Restarts(SupervisionConfig(continue_preempted=False)).pause_after(ending(75, 5))[0] is None


def test_an_error_after_a_growth_is_tried_again():
    restarts = Restarts(SETTINGS)
    grown = replace(ending(75, 5), is_growing=True)
    assert restarts.pause_after(grown)[0] == 0
    assert restarts.pause_after(ending(2))[0] is not None


def test_the_pause_of_very_many_restarts_is_the_longest():
    restarts = Restarts(SupervisionConfig(max_restarts=2000, longest_pause=25))
    assert {restarts.pause_after(ending(1))[0] for _ in range(1100)} == {20, 25}


def test_what_worked_before_is_tried_again_and_what_never_did_is_not():
    restarts = Restarts(SETTINGS)
    assert restarts.pause_after(ending(2))[0] is None
    assert restarts.pause_after(ending(2, 5))[0] is not None
    assert restarts.pause_after(ending(2))[0] is not None
    assert restarts.pause_after(ending(2, is_lasting=True))[0] is None


def test_the_ranks_report_the_exit_code_that_a_launcher_hides():
    crash, mistake = said(0, 1, "RuntimeError: lost a peer"), said(1, 2, "DataError: no shard", is_lasting=True)
    assert ending_of(1, [crash, mistake]) == Ending(code=2, reason="DataError: no shard", step=12, is_lasting=True)
    assert ending_of(1, [crash, said(1, 75, "PreemptedError: saved")]).code == 75
    assert ending_of(1, [crash]) == Ending(code=1, reason="RuntimeError: lost a peer", step=12)
    assert ending_of(137, []) == Ending(code=137, reason="exit code 137", step=-1)
    assert ending_of(0, [said(0, 0, "")]).code == 0
