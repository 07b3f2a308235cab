"""Hosts: checked before a start, compared, chosen; a supervisor that starts a job on the fit ones."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from diffusion.config.loading import load_config
from diffusion.config.operations import SupervisionConfig
from diffusion.config.schema import Config
from diffusion.errors import ConfigurationError, MachineError
from diffusion.operations.checks import nodes
from diffusion.operations.checks.nodes import DeviceSpeed, check_this_node
from diffusion.operations.checks.verdicts import Level, Verdict, problem
from diffusion.operations.events import EventLog, read_events
from diffusion.operations.hosts import CHECK_MODULE, HostedJob, HostPool, Survey, check_over_ssh, choose_hosts, survey
from diffusion.operations.supervisor import Supervisor
from scripts.supervise import parse_arguments, read_pool, webhook_address
from tests.tools.training_runs import ROOT

pytestmark = pytest.mark.slow

HOSTS = ["n0", "n1", "n2", "n3"]


def run_of(global_batch_size: int, *overrides: str) -> Config:
    return load_config(ROOT / "tests/tools/toy.yaml", [f"data.global_batch_size={global_batch_size}", *overrides])


def ask(answers: dict[str, Sequence[str]], timeout: float = 60) -> Survey:
    usual = answer_of_host()
    return survey(HOSTS, lambda host: answers.get(host, usual), timeout)


def chosen(found: Survey, *overrides: str, wanted: int | None = None, ranks_per_host: int | None = None):
    """The chosen hosts, in words, and the world size."""
    pool = HostPool(hosts=found.hosts, wanted=wanted, ranks_per_host=ranks_per_host)
    hosts, num_ranks = choose_hosts(found, pool, run_of(64, *overrides))
    return " ".join(hosts), num_ranks


def answer_of_host(*, flops: float = 7e14, num_gpus: int = 8, verdicts: Sequence = ()) -> list[str]:
    reading = {"name": "any", "host": "any", "num_gpus": num_gpus, "flops": flops, "copied": 3e12}
    text = json.dumps({"reading": reading, "verdicts": [asdict(one) for one in verdicts]})
    return ["echo", "-e", f"Welcome!\\n{text}"]


def test_unfit_hosts_are_named_with_what_is_wrong_and_the_others_chosen():
    full = problem("output folder", "no room", "free space")
    found = ask(
        {
            "n0": ["sleep", "120"],
            "n1": answer_of_host(verdicts=[full]),
            "n2": ["sh", "-c", "echo 'ssh: connect to host n2: No route' >&2; exit 255"],
        },
        timeout=5,
    )
    wrong = {verdict.where: verdict.sentence for verdict in found.verdicts if verdict.level is Level.problem}
    assert wrong["n0"].startswith("no answer for 5 s")
    assert wrong["n1"] == "no room: free space"
    assert wrong["n2"].startswith("the check failed (ssh: connect to host n2: No route)")
    assert found.unfit == HOSTS[:3]
    assert chosen(found) == ("n3", 8)


def test_a_missing_ssh_is_named():
    found = ask({"n1": ["no-ssh-here"]})
    assert found.unfit == ["n1"]
    assert "no-ssh-here cannot be started: No such file" in str(found.verdicts)


def test_a_host_that_is_out_of_line_is_replaced_by_a_spare_one_and_without_one_the_number_stays_legal():
    found = ask({"n1": answer_of_host(flops=4e14)})
    assert found.unfit == ["n1"]
    assert chosen(found, wanted=2) == ("n0 n2", 16)
    assert chosen(found, wanted=4) == ("n0 n2", 16), "64 samples cannot be divided among 24 ranks"
    assert chosen(ask({"n1": answer_of_host(num_gpus=7)}), wanted=4, ranks_per_host=2) == ("n0 n2", 4)


def test_each_host_starts_as_many_ranks_as_it_has_gpus_so_that_others_are_left_out():
    found = ask({"n0": answer_of_host(num_gpus=16)})
    assert found.unfit == [], "it has more than others, which is no fault"
    assert chosen(found, wanted=2) == ("n1 n2", 16)
    assert chosen(found, wanted=2, ranks_per_host=8) == ("n0 n1", 16)


def test_no_number_of_hosts_divides_the_batch():
    groups = run_of(24, "data.mixing=groups", "data.group_size=4")
    found = ask({})
    assert choose_hosts(found, HostPool(hosts=found.hosts, ranks_per_host=2), groups)[1] == 6, "whole groups"
    with pytest.raises(MachineError, match=r"data\.global_batch_size"):
        choose_hosts(found, HostPool(hosts=found.hosts, ranks_per_host=5), groups)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["trainer.parallelism=fsdp", "trainer.num_replicas=16"], r"trainer\.num_replicas is 16, .* 8 ranks"),
        (
            ["trainer.parallelism=ddp", "performance.cuda_graphs=true", "trainer.device_train_microbatch_size=4"],
            r"performance\.cuda_graphs",
        ),
    ],
)
def test_a_number_of_hosts_on_which_the_run_cannot_start_is_not_chosen(overrides, reason):
    assert chosen(ask({}), *overrides, wanted=2) == ("n0 n1", 16)
    alone = ask({host: answer_of_host(verdicts=[problem("disk", host)]) for host in HOSTS[:3]})
    with pytest.raises(MachineError, match=reason):
        chosen(alone, *overrides, wanted=2)


def test_what_all_hosts_have_is_no_reason_to_choose_others():
    full = answer_of_host(verdicts=[problem("output folder", "no room", "free space")])
    found = ask(dict.fromkeys(HOSTS, full))
    assert found.unfit == []
    with pytest.raises(MachineError, match="all hosts: no room: free space"):
        chosen(found, wanted=2, ranks_per_host=8)


def test_this_machine_is_checked_and_found_unfit_where_checkpoints_cannot_be_written(server, tmp_path):
    folders = {"fit": tmp_path / "run", "unfit": Path("/dev/null/run")}
    command = [*server.launcher(0), f"{CHECK_MODULE.replace('.', '/')}.py", str(ROOT / "tests/tools/toy.yaml")]
    found = survey(list(folders), lambda host: [*command, f"output_folder={folders[host]}"], timeout=300)
    assert found.unfit == ["unfit"]
    texts = {verdict.where: verdict.what for verdict in found.verdicts}
    assert texts["unfit"] == "/dev/null/run cannot be written: Not a directory"
    assert texts["fit"].endswith("can be written")


def test_a_gpu_with_a_fault_makes_its_machine_unfit_and_the_slowest_one_counts(tmp_path, monkeypatch):
    fast = DeviceSpeed(name="", datasheet_flops=None, matmul_flops=7e14, copy_bytes_per_second=3e12)
    speeds = [fast, replace(fast, matmul_flops=3e14)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(nodes, "check_gpu_errors", lambda: [problem("GPU errors", "damaged")])
    monkeypatch.setattr(nodes, "measure_device", lambda device: speeds[device.index])
    config = load_config(ROOT / "tests/tools/toy.yaml", [f"output_folder={tmp_path}", "trainer.device=auto"])
    reading, verdicts = check_this_node(config)
    assert (reading.num_gpus, reading.flops, reading.copied) == (2, 3e14, 3e12)
    assert [verdict.check for verdict in verdicts if verdict.level is Level.problem] == ["GPU errors"]


def test_the_check_of_another_host_keeps_its_arguments_in_one_piece(tmp_path, monkeypatch):
    (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s|" "$@"')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("BIN", str(tmp_path))
    monkeypatch.setenv("SSH", "ssh -i key")
    *ssh, host, remote = check_over_ssh(["a.yaml", "x=[{a: 'b c'}, $HOME]"])("n7")
    assert (ssh[:3], host) == (["ssh", "-i", "key"], "n7")
    done = subprocess.run(["bash", "-c", remote], capture_output=True, text=True, check=True)
    assert done.stdout == f"-m|{CHECK_MODULE}|a.yaml|x=[{{a: 'b c'}}, $HOME]|"


FULL = problem("output folder", "no room", "free space")
POOL = HostPool(hosts=("n0", "n1", "n2"), wanted=2, ranks_per_host=2)


@pytest.fixture
def answer(tmp_path, monkeypatch):
    """Decide what each host of the pool answers; the job is a command that notes the hosts it gets."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/bash\ncat {tmp_path}/"${{@: -2:1}}"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("SSH", f"{ssh} -p 22")

    def decide(host: str, *verdicts: Verdict, **speed: float) -> None:
        reading = {"name": host, "host": host, "num_gpus": 0, **speed}
        (tmp_path / host).write_text(json.dumps({"reading": reading, "verdicts": [asdict(one) for one in verdicts]}))

    for host in POOL.hosts:
        decide(host)
    return decide


def supervise(folder: Path, code: int, *, max_restarts: int = 10, timeout: float | None = 60.0) -> int:
    run = folder / "run"
    events = EventLog(run)
    note = f"echo $RANKS_PER_HOST > {folder}/environment; echo $@ >> {folder}/starts; exit {code}"
    command = ["bash", "-c", note, "job", "{hosts}"]
    job = HostedJob(command, [], POOL, run_of(8), timeout, events)
    settings = SupervisionConfig(first_pause=0.01, longest_pause=0.01, max_restarts=max_restarts)
    return Supervisor(job.start, run, run / "beats", settings, events, environment=job.environment).run()


def test_a_spare_host_takes_the_place_of_an_unfit_one(answer, tmp_path):
    answer("n1", FULL)
    assert supervise(tmp_path, 0) == 0
    unfit, started, finished = read_events(tmp_path / "run")
    assert (unfit["event"], unfit["host"], unfit["reason"]) == ("unfit", "n1", "no room: free space")
    assert (started["event"], finished["event"]) == ("started", "finished")
    assert (tmp_path / "starts").read_text() == "n0 n2\n"
    assert (tmp_path / "environment").read_text() == "2\n"


def test_hosts_are_checked_before_each_start(answer, tmp_path):
    answer("n0", FULL)
    answer("n2", FULL)
    assert supervise(tmp_path, 1, max_restarts=1) == 1
    assert (tmp_path / "starts").read_text() == "n1\nn1\n", "a smaller number of ranks that divides the batch"
    unfit = [event["host"] for event in read_events(tmp_path / "run") if event["event"] == "unfit"]
    assert unfit == ["n0, n2", "n0, n2"]


def test_nothing_is_started_on_unfit_machines(answer, tmp_path):
    for host in POOL.hosts:
        answer(host, FULL)
    assert supervise(tmp_path, 0) == 2
    assert not (tmp_path / "starts").exists()
    *_, last = read_events(tmp_path / "run")
    assert last["event"] == "stopped"
    assert last["reason"].startswith("MachineError: all hosts: no room: free space; no restart before the first step")


@pytest.mark.parametrize("is_growing", [False, True])
def test_a_signal_ends_the_checks_of_hosts(answer, tmp_path, monkeypatch, is_growing):
    answer("n2", FULL)
    run, events = tmp_path / "run", EventLog(tmp_path / "run")
    job = HostedJob(["sleep", "0.1"], [], replace(POOL, wanted=None), run_of(8), 60.0, events)
    if is_growing:
        assert job.start()
    monkeypatch.setattr(job, "_check", lambda host: ["sh", "-c", f"touch {tmp_path}/asked; exec sleep 60"])

    def interrupt() -> None:
        while not (tmp_path / "asked").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    began, thread = time.monotonic(), threading.Thread(target=interrupt)
    supervisor = Supervisor(
        job.start, run, run / "beats", SupervisionConfig(), events, environment={}, interrupt=job.interrupt
    )
    supervisor.listen()
    thread.start()
    assert job.could_grow() is False if is_growing else supervisor.run() == 75
    thread.join()
    assert time.monotonic() - began < 30
    assert not is_growing or supervisor.run() == 75
    assert [event["event"] for event in read_events(run)][-1] == "stopped"


def test_without_a_check_the_first_hosts_are_taken(answer, tmp_path):
    answer("n0", FULL)
    assert supervise(tmp_path, 0, timeout=None) == 0
    assert (tmp_path / "starts").read_text() == "n0 n1\n"


def test_the_job_starts_the_ranks_for_which_its_hosts_were_chosen(answer, tmp_path, monkeypatch):
    monkeypatch.setenv("RANKS_PER_HOST", "9")
    for num_gpus, ranks in ((0, "1"), (4, "4")):
        for host in POOL.hosts:
            answer(host, num_gpus=num_gpus)
        pool = replace(POOL, ranks_per_host=None)
        job = HostedJob(["{hosts}"], [], pool, run_of(8), 60.0, EventLog(tmp_path))
        assert job.start() == ["n0 n1"]
        assert job.environment["RANKS_PER_HOST"] == ranks


def test_a_job_could_grow_when_more_hosts_are_fit_than_it_uses(answer, tmp_path):
    answer("n1", FULL)
    answer("n2", FULL)
    pool = replace(POOL, wanted=None)
    job = HostedJob(["{hosts}"], [], pool, run_of(8), 60.0, EventLog(tmp_path))
    assert job.start() == ["n0"]
    assert not job.could_grow()
    answer("n0", FULL)  # It is busy, and not asked.
    answer("n2")
    assert job.could_grow()
    answer("n0", flops=7e14)
    answer("n1", FULL, flops=7e14)
    answer("n2", FULL, flops=3e14)
    assert job.start() == ["n0"]
    answer("n2", flops=3e14)
    assert not job.could_grow(), "slower than the host in use was"
    answer("n0")
    answer("n2")
    assert job.start() == ["n0 n2"]
    answer("n1")
    assert not job.could_grow(), "8 samples cannot be divided among 6 ranks"


def test_this_machine_is_refused_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemExit('of a stranger')")
    arguments = [f"{ROOT}/tests/tools/toy.yaml", "output_folder=/dev/null/run"]
    events = EventLog(tmp_path)
    machines = HostedJob(["true"], arguments, None, run_of(8), 300, events)
    with pytest.raises(MachineError, match=r"^here: /dev/null/run"):
        machines.start()
    (event,) = read_events(tmp_path)
    assert (event["event"], event["host"]) == ("unfit", "here")


def pool_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> HostPool | None:
    monkeypatch.setattr(sys, "argv", ["supervise.py", *arguments])
    return read_pool(parse_arguments())


def test_a_file_of_hosts_may_hold_comments(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("# rack 1\nn0 n1  # the new ones\n\nn2\n")
    pool = pool_of(monkeypatch, "--hosts", str(tmp_path / "hosts"), "--nodes", "2", "--", "ssh.sh", "{hosts}", "x.yaml")
    assert pool == HostPool(hosts=("n0", "n1", "n2"), wanted=2)


def test_a_file_of_hosts_is_utf_8_with_or_without_a_mark(tmp_path, monkeypatch):
    file, arguments = tmp_path / "hosts", ["--", "ssh.sh", "{hosts}", "x.yaml"]
    file.write_text("n0\n", encoding="utf-8-sig")
    assert pool_of(monkeypatch, "--hosts", str(file), *arguments) == HostPool(hosts=("n0",))
    file.write_text("n0 # für später", encoding="latin-1")
    with pytest.raises(ConfigurationError, match=str(file)):
        pool_of(monkeypatch, "--hosts", str(file), *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["composer", "-n", "8", "run.py", "x.yaml"], "does not know -n 8 run.py x.yaml: put `--` before the command"),
        (["--nodes", "4", "--", "composer", "x.yaml"], "--hosts FILE"),
        (["--ranks-per-host", "8", "--", "composer", "x.yaml"], "--hosts FILE"),
        (["--grow-after", "30m", "--", "composer", "x.yaml"], "--hosts FILE"),
        (["--grow-after", "30", "--", "composer", "x.yaml"], "argument --grow-after: 30 is no time: give 90s, 30m"),
        (
            ["--nodes=-1", "--hosts", "hosts", "--", "ssh.sh", "{hosts}"],
            "argument --nodes: -1 is no whole number of at",
        ),
        (["--hosts", "hosts", "--", "ssh.sh", "x.yaml"], "{hosts}"),
        (["--hosts", "twice", "--", "ssh.sh", "{hosts}"], "--hosts twice names n1 more than once"),
        (["--hosts", "none", "--", "ssh.sh", "{hosts}"], "--hosts none names no hosts"),
    ],
)
def test_mistakes_in_the_hosts_of_a_supervisor(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, text in {"hosts": "n0\nn1\n", "twice": "n1 n0\nn1\n", "none": "# n0\n"}.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        pool_of(monkeypatch, *arguments)
    assert message in str(caught.value)


def test_the_address_of_the_webhook_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv("ALARMS", "http://x/SECRET")
    assert webhook_address("ALARMS") == "http://x/SECRET"
    assert webhook_address(None) is None
    with pytest.raises(ConfigurationError, match=r"operations\.supervision\.webhook_variable"):
        webhook_address("ABSENT")
