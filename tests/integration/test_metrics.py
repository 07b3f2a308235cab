"""Prometheus endpoints of a real run, its supervisor and its watchers; what the dashboard asks for is there."""

import json
import math
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diffusion.config.operations import PrometheusConfig
from diffusion.errors import MachineError
from diffusion.operations import metrics as names
from diffusion.operations.heartbeats import HeartbeatFile, HeartbeatRecord, Phase, read_heartbeats
from diffusion.operations.metrics import MEANINGS, read_run_metrics, served
from diffusion.operations.processes import own_record
from tests.tools.evaluation_toys import write_prompts
from tests.tools.forking import free_port
from tests.tools.training_runs import ROOT, Job, TrainingServer

DASHBOARD = json.loads((ROOT / "launchers" / "grafana.json").read_text())
LOGGED = (names.LOSS, names.IMAGES_PER_SECOND, names.STEPS_PER_SECOND, names.MFU, names.DATA_WAITING)
OF_RUN_FOLDER = (names.STEP, names.HEARTBEAT_AGE, names.RESTARTS, names.GPU_HOURS, names.DOLLARS)


def scrape(port: int | None) -> dict[tuple[str, str], float]:
    """Values by run and name; none while nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.labels["run"], sample.name): sample.value for sample in samples}


def scrape_when(job: Job, port: int, ready: Callable[[dict[str, float]], bool]) -> dict[str, float]:
    """Scrape an endpoint until the values of its one run are so."""
    found: dict[str, float] = {}

    def is_ready() -> bool:
        nonlocal found
        values = scrape(port)
        assert {run for run, _ in values} <= {"run"}
        found = {name: value for (_, name), value in values.items()}
        time.sleep(0.1)
        return bool(found) and ready(found)

    job.wait_for(is_ready)
    return found


def test_the_step_is_unknown_while_a_run_starts(tmp_path: Path):
    file = HeartbeatFile(tmp_path / "beats", 0)
    for step in (-1, 0, 7):
        record = HeartbeatRecord(**own_record(), rank=0, count=1, phase=Phase.starting, step=step, num_done=0)
        file.write(record)
        found = read_run_metrics(tmp_path, tmp_path / "beats")[names.STEP]
        assert math.isnan(found) if step < 0 else found == step
    file.close()


@pytest.mark.slow
def test_a_run_its_supervisor_and_its_watchers_expose_what_the_dashboard_asks_for(
    server: TrainingServer, tmp_path: Path
):
    run, output, ports = tmp_path / "run", tmp_path / "evaluation", [free_port() for _ in range(3)]
    composer = server.programs(tmp_path / "bin") / "composer"
    overrides = [
        f"output_folder={run}",
        "trainer.max_duration=100000ba",
        "trainer.save_interval=20ba",
        "trainer.keep_checkpoints=3",
        "samples.prompts=[]",
        "loggers.utilisation_interval=5",
        f"loggers.prometheus.port={ports[0]}",
        f"operations.supervision.prometheus.port={ports[1]}",
        "operations.supervision.check_timeout=null",
        "operations.supervision.first_pause=0.1",
        "plan.price_per_gpu_hour=3600",
    ]
    command = ["scripts/supervise.py", "--", str(composer), "run.py", "tests/tools/toy.yaml", *overrides]
    supervisor = server.start(0, command)

    def is_known(values: dict[str, float]) -> bool:
        return all(math.isfinite(values[name]) for name in LOGGED if name != names.MFU) and values[names.STEP] >= 40

    try:
        of_run = scrape_when(supervisor, ports[0], is_known)
        assert set(of_run) == {*LOGGED, *OF_RUN_FOLDER}
        assert 0 < of_run[names.LOSS] < 10
        assert of_run[names.IMAGES_PER_SECOND] == pytest.approx(8 * of_run[names.STEPS_PER_SECOND])
        assert 0 <= of_run[names.DATA_WAITING] <= 1
        assert math.isnan(of_run[names.MFU]), "the peak of a CPU is not known"
        assert of_run[names.RESTARTS] == 0
        assert of_run[names.DOLLARS] == pytest.approx(3600 * of_run[names.GPU_HOURS])

        [rank] = read_heartbeats(run / "heartbeats")
        os.kill(rank.pid, signal.SIGKILL)
        of_supervisor = scrape_when(supervisor, ports[1], lambda values: values[names.RESTARTS] == 1)
        assert set(of_supervisor) == set(OF_RUN_FOLDER)
        assert of_supervisor[names.DOLLARS] >= of_run[names.DOLLARS]
        again = scrape_when(supervisor, ports[0], is_known)
        assert 0 <= again[names.HEARTBEAT_AGE] < 60
        assert again[names.RESTARTS] == 1
    finally:
        os.kill(supervisor.pids[0], signal.SIGTERM)
        ended = supervisor.finish()
    assert ended.codes == [75], ended.output[-3000:]

    write_prompts(tmp_path / "prompts.txt", ["a red star"])
    evaluation = [
        *("evaluate.py", "tests/tools/toy_evaluation.yaml", "watch=true", f"model={run}", f"output_folder={output}"),
        *("poll_seconds=0.2", "guidance_scales=[1.0]", "protocol.metrics=[]", "protocol.reference=null"),
        *("protocol.compositional={suite: demo.shape_checks.shapes, images_per_prompt: 1}", "protocol.prompts=null"),
    ]
    queue = server.start(0, [*evaluation, "watch_only=true", f"loggers.prometheus.port={ports[2]}"])
    try:
        before = scrape_when(queue, ports[2], lambda values: True)
        assert before == {names.QUEUE: 3, names.LEASED: 0, names.DONE: 0}
        worker = server.start(0, [*evaluation, "idle_seconds=0.5"])
        assert scrape_when(queue, ports[2], lambda values: values[names.LEASED] == 1)[names.QUEUE] > 0
        assert worker.finish().codes == [0]
        after = scrape(ports[2])
        assert after == {("run", names.QUEUE): 0, ("run", names.LEASED): 0, ("run", names.DONE): 3}
        queue.wait_for(lambda: len((output / "metrics.jsonl").read_text().splitlines()) == 3)
    finally:
        queue.kill()

    exposed = {*of_run, *of_supervisor, *before}
    assert exposed == MEANINGS.keys()
    asked = {
        name for panel in DASHBOARD["panels"] for target in panel["targets"] for name in metrics_of(target["expr"])
    }
    asked |= {name for one in DASHBOARD["templating"]["list"] for name in metrics_of(one["query"])}
    assert asked <= exposed
    assert asked == MEANINGS.keys(), "the dashboard shows all of them"


def metrics_of(expression: str) -> list[str]:
    """Names of metrics in a query."""
    return re.findall(r"\bdiffusion_\w+", expression)


def test_the_panels_of_the_dashboard_do_not_overlap():
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not own & cells
        assert max(x for x, _ in own) < 24
        cells |= own
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_a_port_in_use_is_replaced_by_a_free_one():
    settings = PrometheusConfig(port=free_port())
    with (
        served(settings, lambda: {"first": {names.STEP: 1}}) as first,
        served(settings, lambda: {"second": {names.STEP: 2}}) as second,
    ):
        assert first == settings.port != second
        assert scrape(first) == {("first", names.STEP): 1}
        assert scrape(second) == {("second", names.STEP): 2}
    with served(settings, dict) as again:
        assert again == settings.port
    assert scrape(first) == {}


@pytest.mark.parametrize("address", ["192.0.2.1", "no.such.host.invalid", "10.0.0..1", "a" * 64])
def test_an_address_of_another_machine_is_the_user_s_mistake(address):
    with pytest.raises(MachineError, match=address), served(PrometheusConfig(port=0, address=address), dict):
        pass


def test_nothing_is_served_without_settings():
    with served(None, dict) as port:
        assert port is None


def test_a_forked_process_does_not_keep_the_port():
    with served(PrometheusConfig(port=0), dict) as port:
        ready, end = os.pipe()
        if (child := os.fork()) == 0:
            os.read(ready, 1)
            os._exit(0)
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen()
            assert probe.getsockname()[1] == port
    finally:
        os.write(end, b"x")
        os.waitpid(child, 0)
