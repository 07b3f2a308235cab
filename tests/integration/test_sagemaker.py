"""Jobs of SageMaker: started, described and stopped through boto3, and what a container makes of them."""

import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import boto3
import pytest
import yaml
from botocore.stub import Stubber
from moto.moto_api._internal import moto_api_backend
from moto.sagemaker.models import sagemaker_backends
from moto.server import ThreadedMotoServer
from torch.distributed.run import config_from_args, parse_args

from diffusion.config.loading import load_config
from diffusion.errors import ConfigurationError, MachineError
from launchers import sagemaker
from tests.tools.forking import free_port
from tests.tools.training_runs import ROOT

PHASE1 = ["yamls/phase1.yaml", "model.pretrained=/opt/ml/model", "validation=null", "optimizer.lr=2e-4"]
TEMPLATE = ROOT / "launchers/sagemaker.yaml"
ARN = "arn:aws:sagemaker:us-east-1:123456789012:training-job/phase1"
ACCOUNT, REGION = "123456789012", "us-east-1"


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    """moto's server: SageMaker and CloudWatch over HTTP."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def client(aws: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    moto_api_backend.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", aws)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    return boto3.client("sagemaker")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command in this process; returns what it prints."""

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["sagemaker.py", *arguments])
        sagemaker.main()
        return capsys.readouterr().out

    return run


def job_file(folder: Path, **changes: Any) -> str:
    """The template with other fields."""
    fields = yaml.safe_load(TEMPLATE.read_text())
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(fields | changes))
    return str(path)


def container(root: Path, job: dict[str, Any], host: str) -> Path:
    """What SageMaker makes of a job's description in the container of a host."""
    config = root / "input" / "config"
    config.mkdir(parents=True)
    hosts = [f"algo-{number + 1}" for number in range(job["ResourceConfig"]["InstanceCount"])]
    files = {
        "resourceconfig": {"current_host": host, "hosts": hosts, "network_interface_name": "eth0"},
        "hyperparameters": job["HyperParameters"],
        "inputdataconfig": {
            channel["ChannelName"]: {
                "TrainingInputMode": channel["InputMode"],
                "S3DistributionType": channel["DataSource"]["S3DataSource"]["S3DataDistributionType"],
            }
            for channel in job["InputDataConfig"]
        },
    }
    for name, content in files.items():
        (config / f"{name}.json").write_text(json.dumps(content))
    return root


def test_a_job_becomes_the_command_of_the_run_on_each_host(client, run, tmp_path):
    name, _, place = run("submit", *PHASE1).partition(": ")
    assert place == "s3://BUCKET/runs/phase1/checkpoints\n"
    job = client.describe_training_job(TrainingJobName=name)
    assert job["EnableManagedSpotTraining"]
    assert job["StoppingCondition"]["MaxWaitTimeInSeconds"] > job["StoppingCondition"]["MaxRuntimeInSeconds"]
    assert job["CheckpointConfig"] == {"S3Uri": "s3://BUCKET/runs/phase1/run", "LocalPath": "/opt/ml/checkpoints"}
    entry = job["AlgorithmSpecification"]
    assert (*entry["ContainerEntrypoint"], *entry["ContainerArguments"]) == (
        "python",
        "launchers/sagemaker.py",
        "train",
    )

    arguments, variables = sagemaker.command(container(tmp_path, job, "algo-3"), "8")
    parsed = parse_args(arguments[1:])
    launch, _, _ = config_from_args(parsed)
    assert (launch.min_nodes, launch.max_nodes, launch.nproc_per_node) == (4, 4, 8)
    assert (launch.rdzv_configs["rank"], launch.rdzv_endpoint) == (2, "algo-1:29500")
    assert variables == {"NETWORK_INTERFACE": "eth0"}
    assert Path(parsed.training_script) == ROOT / "run.py"
    file, *overrides = parsed.training_script_args
    config = load_config(ROOT / file, overrides)
    assert (config.output_folder, config.data.local) == (f"{tmp_path}/checkpoints", f"{tmp_path}/input/data/train")
    assert config.trainer.checkpoint_folder == "s3://BUCKET/runs/phase1/checkpoints"
    assert (config.run_name, config.optimizer.lr, config.validation) == ("phase1", 2e-4, None)


def test_quotes_of_a_value_arrive(client, run, tmp_path):
    prompt = 'samples.prompts=[a sign that says "stop"]'
    name = run("submit", *PHASE1, 'group="null"', prompt).partition(": ")[0]
    root = container(tmp_path, client.describe_training_job(TrainingJobName=name), "algo-1")
    assert sagemaker.command(root, "8")[0][-2:] == ['group="null"', prompt]


def test_quotes_of_the_sdks_and_missing_channels(tmp_path):
    """A job that was not made by `submit`."""
    resources = {"ResourceConfig": {"InstanceCount": 1}, "InputDataConfig": []}
    parameters = {"yaml": '"tests/tools/toy.yaml"', "trainer.max_duration": '"4ba"'}
    root = container(tmp_path, resources | {"HyperParameters": parameters}, "algo-1")
    (root / "input/config/inputdataconfig.json").unlink()
    arguments, _ = sagemaker.command(root, "gpu")
    file, *overrides = parse_args(arguments[1:]).training_script_args
    assert load_config(ROOT / file, overrides).trainer.max_duration == "4ba"
    assert [text.partition("=")[0] for text in overrides] == ["output_folder", "trainer.max_duration"]


def test_files_that_differ_between_hosts_are_refused(client, run, tmp_path):
    job = yaml.safe_load(TEMPLATE.read_text())
    job["InputDataConfig"][0]["DataSource"]["S3DataSource"]["S3DataDistributionType"] = "ShardedByS3Key"
    with pytest.raises(ConfigurationError, match=r"train.*ShardedByS3Key"):
        run("submit", *PHASE1, "--job", job_file(tmp_path, InputDataConfig=job["InputDataConfig"]))
    assert client.list_training_jobs()["TrainingJobSummaries"] == []
    root = container(tmp_path / "ml", job | {"HyperParameters": {"yaml": "yamls/phase1.yaml"}}, "algo-1")
    with pytest.raises(ConfigurationError, match=r"train.*ShardedByS3Key"):
        sagemaker.command(root, "8")


@pytest.mark.parametrize(
    ("arguments", "changes", "named"),
    [
        (["yamls/phase1.yaml"], {}, "model.pretrained"),
        ([*PHASE1, "optimizer.rate=1"], {}, "optimizer.rate"),
        ([*PHASE1, "run_name=phase/1"], {}, "run_name"),
        (["/etc/hostname"], {}, "yamls/"),
        (PHASE1, {"OutputDataConfig": None}, "S3OutputPath"),
        (PHASE1, {"Instances": 4}, "Instances"),
        (PHASE1, {"RoleArn": None}, "RoleArn"),
    ],
)
def test_a_mistake_ends_before_there_is_a_job(client, run, tmp_path, arguments, changes, named):
    with pytest.raises(ConfigurationError, match=named):
        run("submit", *arguments, "--job", job_file(tmp_path, **changes))
    assert client.list_training_jobs()["TrainingJobSummaries"] == []


def test_the_next_job_continues_the_run_and_waits_for_the_one_before(client, run):
    fields = yaml.safe_load(TEMPLATE.read_text())
    earlier = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    _, first = sagemaker.training_job(fields, ROOT / PHASE1[0], PHASE1[1:], earlier)
    client.create_training_job(**first)
    started = sagemaker_backends[ACCOUNT][REGION].training_jobs[first["TrainingJobName"]]
    started.training_job_status = "Stopping"
    with pytest.raises(ConfigurationError, match=first["TrainingJobName"]):
        run("submit", *PHASE1)
    started.training_job_status = "Stopped"
    run("submit", *PHASE1, "run_name=phase1-b")
    assert sagemaker.find_job(client, "phase1") == first["TrainingJobName"]
    second = run("submit", *PHASE1).partition(": ")[0]
    assert sagemaker.find_job(client, "phase1") == second != first["TrainingJobName"]
    job = client.describe_training_job(TrainingJobName=second)
    assert job["CheckpointConfig"] == first["CheckpointConfig"]
    assert job["HyperParameters"] == first["HyperParameters"]


def test_the_state_of_a_run_is_shown(client, run):
    name = run("submit", *PHASE1).partition(": ")[0]
    job = sagemaker_backends[ACCOUNT][REGION].training_jobs[name]
    job.training_job_status, job.failure_reason = "Failed", "InternalServerError: try again"
    shown = run("status", "phase1")
    assert shown.startswith(f"{name}: Failed")
    assert "InternalServerError: try again" in shown
    assert "Starting: Preparing the instances" in shown
    with pytest.raises(ConfigurationError, match="phase2"):
        run("status", "phase2")


def test_the_output_of_all_hosts_is_shown_by_time(run):
    name = run("submit", *PHASE1).partition(": ")[0]
    cloudwatch = boto3.client("logs")
    cloudwatch.create_log_group(logGroupName=sagemaker.LOG_GROUP)
    now = int(time.time() * 1000)
    for host, seconds in (("algo-1", [-7200, -2]), ("algo-2", [-3])):
        stream = {"logGroupName": sagemaker.LOG_GROUP, "logStreamName": f"{name}/{host}-1763700000"}
        cloudwatch.create_log_stream(**stream)
        events = [{"timestamp": now + 1000 * second, "message": f"step {second}\n"} for second in seconds]
        cloudwatch.put_log_events(**stream, logEvents=events)
    assert sorted(run("logs", "phase1").splitlines()) == ["algo-1: step -2", "algo-1: step -7200", "algo-2: step -3"]
    assert len(run("logs", "phase1", "--since", "1h").splitlines()) == 2


def test_what_moto_does_not_know(client):
    """Retries, stopping, and that logs are those of the job alone."""
    jobs = {
        "TrainingJobSummaries": [
            {
                "TrainingJobName": "phase1-20261121000000",
                "TrainingJobArn": ARN,
                "CreationTime": 0,
                "TrainingJobStatus": "Stopped",
            }
        ]
    }
    added = ("TrainingJobName", "AlgorithmSpecification", "HyperParameters", "CheckpointConfig")
    template = yaml.safe_load(TEMPLATE.read_text())
    assert template["RetryStrategy"]["MaximumRetryAttempts"] > 1
    cloudwatch = boto3.client("logs")
    with Stubber(client) as stub, Stubber(cloudwatch) as log_stub:
        stub.add_response("list_training_jobs", {"TrainingJobSummaries": []}, {"NameContains": "phase1"})
        stub.add_response("create_training_job", {"TrainingJobArn": ARN}, template | dict.fromkeys(added, ANY))
        sagemaker.submit(client, TEMPLATE, ROOT / PHASE1[0], PHASE1[1:])
        stub.add_response("list_training_jobs", jobs)
        stub.add_response("stop_training_job", {}, {"TrainingJobName": "phase1-20261121000000"})
        sagemaker.stop(client, "phase1")
        stub.add_response("list_training_jobs", jobs)
        request = {"logGroupName": sagemaker.LOG_GROUP, "logStreamNamePrefix": "phase1-20261121000000/"}
        log_stub.add_response("filter_log_events", {"events": []}, request)
        sagemaker.logs(client, cloudwatch, "phase1", None)
        stub.assert_no_pending_responses()
        log_stub.assert_no_pending_responses()


def test_a_missing_region_and_an_absent_server_are_messages(run, monkeypatch):
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(MachineError, match="connect"):
        run("status", "phase1")
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    with pytest.raises(MachineError, match="region"):
        run("status", "phase1")
