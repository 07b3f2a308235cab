"""Sweeps in real processes."""

import csv
import json
import os
import runpy
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from diffusion.errors import MachineError
from diffusion.files import open_lock
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.operations.heartbeats import HeartbeatRecord, read_heartbeats
from diffusion.sweeps import Point, run_points

pytestmark = pytest.mark.slow

SHORT = [
    "trainer.max_duration=3ba",
    "trainer.save_interval=3ba",
    "schedule.warmup=0ba",
    "algorithms.ema=null",
    "samples.prompts=[]",
]
SWEEP = """
method: grid
parameters:
  optimizer.lr: {values: [1.0e-4, 1.0e-3, 1.0e-2]}
command: ['${env}', '${interpreter}', '${program}', tests/tools/toy.yaml, '${args_no_hyphens}']
"""


def starts(folder: Path) -> dict[str, int]:
    """How often each point was started."""
    return {
        path.parent.name: sum(json.loads(line)["event"] == "start" for line in path.read_text().splitlines())
        for path in folder.glob("*/starts.jsonl")
    }


def test_a_killed_sweep_continues_and_repeats_nothing(server, tmp_path):
    (tmp_path / "three.yaml").write_text(SWEEP)
    folder, python = tmp_path / "out" / "three", str(server.programs(tmp_path / "bin") / "python")
    command = ["scripts/sweep.py", str(tmp_path / "three.yaml"), "--out", str(tmp_path / "out"), "--launcher", python]
    command += SHORT

    def begun() -> list[HeartbeatRecord]:
        """The heartbeat of the point that is not finished."""
        return [
            heartbeat
            for beats in folder.glob("*/heartbeats")
            if not (beats.parent / "finished.json").exists()
            for heartbeat in read_heartbeats(beats)
        ]

    sweep = server.start(0, command)
    sweep.wait_for(lambda: bool(list(folder.glob("*/finished.json"))) and bool(begun()))
    sweep.kill()
    for heartbeat in begun():
        with suppress(ProcessLookupError):  # It may have come to its end.
            os.kill(heartbeat.pid, signal.SIGKILL)
    done = {path.parent.name for path in folder.glob("*/finished.json")}
    assert 1 <= len(done) < 3

    again = server.command(0, command).output
    assert len(list(folder.glob("*/finished.json"))) == 3
    counted = starts(folder)
    assert len(counted) == 3 and all(counted[name] == 1 for name in done)
    assert sum(counted.values()) <= 4, "only the killed point is started twice"
    for name in counted:
        assert series(read_metrics(folder / name / "metrics.jsonl"), TRAIN_LOSS)[0] == [0, 1, 2]
    server.command(0, command)
    assert starts(folder) == counted

    rows = list(csv.DictReader((folder / "points.csv").open()))
    assert {(row["optimizer.lr"], row["status"]) for row in rows} == {
        (lr, "finished") for lr in ("0.0001", "0.001", "0.01")
    }
    losses = [float(row[TRAIN_LOSS]) for row in rows]
    assert losses == sorted(losses) and len(set(losses)) == 3
    for row in rows:
        values = series(read_metrics(folder / row["point"] / "metrics.jsonl"), TRAIN_LOSS)[1]
        assert float(row[TRAIN_LOSS]) == pytest.approx(values[-1])
        assert float(row["gpu_hours"]) > 0
    assert all(row["point"] in again for row in rows)


def points(folder: Path, scripts: dict[str, str]) -> list[Point]:
    return [
        Point(name=name, values={}, folder=folder / name, command=[sys.executable, "-c", script])
        for name, script in scripts.items()
    ]


def test_launched_points_run_side_by_side_and_failures_are_told(tmp_path):
    def finish(name: str, wait_for: str) -> str:
        here = f"from pathlib import Path\nimport time\nPath('{tmp_path}/{name}/begun').touch()\n"
        wait = f"while not Path('{tmp_path}/{wait_for}/begun').exists(): time.sleep(0.01)\n"
        return f"{here}{wait}Path('{tmp_path}/{name}/finished.json').touch()"

    scripts = {
        "a": finish("a", "b"),
        "b": finish("b", "a"),
        "wrong": "import sys; print('no data'); sys.exit(2)",
        "queued": "",
        "killed": "import os; os.kill(os.getpid(), 9)",
    }
    failed = run_points(points(tmp_path, scripts), num_jobs=2)
    assert {name: int(reason.rpartition(" ")[2]) for name, reason in failed.items()} == {
        "wrong": 2,
        "queued": 0,
        "killed": -9,
    }
    assert (tmp_path / "wrong" / "sweep.log").read_text() == "no data\n"
    absent = Point(name="absent", values={}, folder=tmp_path / "absent", command=["no-such-launcher"])
    others = points(tmp_path, {"next": finish("next", "a")})
    failed = run_points([absent, *others], num_jobs=1)
    assert failed.keys() == {"absent"} and "no-such-launcher" in failed["absent"]


def test_the_command_names_the_points_that_failed_and_begins_the_others(tmp_path, monkeypatch, capsys):
    (tmp_path / "three.yaml").write_text(SWEEP)
    command = ["sweep.py", str(tmp_path / "three.yaml"), "--out", str(tmp_path / "out")]
    main = runpy.run_path("scripts/sweep.py")["main"]
    monkeypatch.setattr(sys, "argv", [*command, "--table"])
    main()
    assert capsys.readouterr().out.count("not begun") == 3
    monkeypatch.setattr(sys, "argv", [*command, "--launcher", "ls --unknown", "--jobs", "3"])
    with pytest.raises(MachineError, match="three") as raised:
        main()
    assert capsys.readouterr().out.count("exit code 2") == 3
    logs = list((tmp_path / "out" / "three").glob("*/sweep.log"))
    assert len(logs) == 3 and all(f"{log}: not finished, exit code 2" in str(raised.value) for log in logs)
    assert "--unknown" in logs[0].read_text()


def test_a_point_that_outlives_its_sweep_is_waited_for(server, tmp_path):
    scripts = {"a": f"import time; time.sleep(0.5); open('{tmp_path}/a/finished.json', 'a').write('1')", "b": ""}
    (point, _) = points(tmp_path, scripts)
    program = tmp_path / "sweep.py"
    program.write_text(
        "from pathlib import Path\n"
        "from diffusion.sweeps import run_points\n"
        "from tests.integration.test_sweep import points\n"
        f"run_points(points(Path({str(tmp_path)!r}), {scripts!r})[:1], num_jobs=1)\n"
    )
    sweep = server.start(0, [str(program)])
    sweep.wait_for(lambda: (point.folder / "sweep.log").exists())
    sweep.kill()
    assert run_points([point], num_jobs=1) == {}
    assert (point.folder / "finished.json").read_text() == "1"


def test_a_sweep_that_is_ended_while_a_point_waits_begins_it_no_more(tmp_path):
    (point,) = points(tmp_path, {"a": ""})
    point.folder.mkdir()
    lock = open_lock(point.folder / "sweep.lock")
    timers = [
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]),
        threading.Timer(5.0, os.close, [lock]),
    ]
    for timer in timers:
        timer.start()
    with pytest.raises((KeyboardInterrupt, SystemExit)):  # Composer's import sets a handler.
        run_points([point], num_jobs=1)
    assert timers[1].is_alive(), "it has not waited for the other process"
    timers[1].join()
    assert not (point.folder / "sweep.log").exists()
