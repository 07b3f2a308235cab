"""Train on SageMaker in a custom image.

    python launchers/sagemaker.py submit YAML [key.sub=value ...]     check the run and start a job
    python launchers/sagemaker.py status RUN                          of the newest job of a run
    python launchers/sagemaker.py logs RUN [--since 1h]               of all its hosts
    python launchers/sagemaker.py stop RUN                            save and end; `submit` continues
    python launchers/sagemaker.py train                               in the container

RUN is the `run_name` of the configuration. A job is `RUN-TIME`, and the jobs of a run continue each other. Instances,
role, image, data and limits are in `launchers/sagemaker.yaml` (or `--job FILE`).
"""

import argparse
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from diffusion.errors import ConfigurationError, MachineError
from diffusion.launch import CommandParser, duration, run_command

ROOT = Path(__file__).resolve().parent.parent
PORT = 29500

CONTAINER = Path("/opt/ml")
"""SageMaker's folder in a container."""

DATA_CHANNEL = "train"

LOG_GROUP = "/aws/sagemaker/TrainingJobs"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = CommandParser(description=__doc__)
    commands = parser.add_subparsers(dest="action", required=True)
    commands.add_parser("train", help="train in the container")
    submitting = commands.add_parser("submit", help="start a job")
    submitting.add_argument("yaml", type=Path, help="configuration of the run, a file of the image")
    submitting.add_argument("overrides", nargs="*", metavar="key.sub=value")
    submitting.add_argument("--job", type=Path, default=ROOT / "launchers" / "sagemaker.yaml", metavar="FILE")
    for name, text in (("status", "state and time"), ("logs", "output of all hosts"), ("stop", "save and end")):
        commands.add_parser(name, help=text).add_argument("run", help="run_name of the configuration")
    commands.choices["logs"].add_argument("--since", type=duration, metavar="TIME", help="of the last 30m, 2h, ...")
    return parser.parse_args()


def refuse_sharded_channel(name: str, distribution: str | None) -> None:
    """Raise if each host sees other files of a channel."""
    if distribution == "ShardedByS3Key":
        raise ConfigurationError(
            f"channel {name}: ShardedByS3Key gives each host other files, but the order of samples is that of the "
            "whole data set, for any number of hosts. Set S3DataDistributionType: FullyReplicated; with InputMode: "
            "FastFile each host reads only what it uses"
        )


def default_overrides(root: Path, channels: Iterable[str]) -> dict[str, str]:
    """Set the keys that follow from SageMaker's folder and the names of the data channels."""
    data = {"data.local": str(root / "input" / "data" / DATA_CHANNEL)} if DATA_CHANNEL in channels else {}
    return {"output_folder": str(root / "checkpoints"), **data}


def command(root: Path, ranks_per_host: str) -> tuple[list[str], dict[str, str]]:
    """Build the command of this host.

    SageMaker describes hosts, hyperparameters and channels in `input/config`. The hyperparameter `yaml` names the
    configuration, all others are its keys.

    Args:
        root: `/opt/ml`.
        ranks_per_host: a number, or `gpu`: one for each GPU.

    Returns:
        The command and its environment variables.

    Raises:
        ConfigurationError: each host sees other files.
    """
    config = root / "input" / "config"
    resources, hyperparameters = (
        json.loads((config / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("resourceconfig", "hyperparameters")
    )
    described = config / "inputdataconfig.json"  # Only where there are channels.
    channels = json.loads(described.read_text(encoding="utf-8")) if described.exists() else {}
    for name, channel in channels.items():
        refuse_sharded_channel(name, channel.get("S3DistributionType"))
    # All values are strings; the SDKs, and `training_job` where quotes are a value's own, write strings as JSON.
    settings = {name: json.loads(value) if value.startswith('"') else value for name, value in hyperparameters.items()}
    yaml, hosts = settings.pop("yaml"), sorted(resources["hosts"])
    overrides = default_overrides(root, channels) | settings
    launch = [
        "torchrun",
        f"--nnodes={len(hosts)}",
        f"--node-rank={hosts.index(resources['current_host'])}",
        f"--master-addr={hosts[0]}",
        f"--master-port={PORT}",
        f"--nproc-per-node={ranks_per_host}",
    ]
    program = [str(ROOT / "run.py"), yaml, *(f"{name}={value}" for name, value in overrides.items())]
    return [*launch, *program], {"NETWORK_INTERFACE": resources.get("network_interface_name", "")}


def train() -> NoReturn:
    """Replace this process by torchrun, which forwards the SIGTERM of a stopped job."""
    arguments, variables = command(CONTAINER, os.environ.get("SM_NUM_GPUS", "gpu"))
    os.chdir(ROOT)
    source = 'source launchers/environment.sh && exec "$@"'
    os.execvpe("bash", ["bash", "-c", source, "bash", *arguments], os.environ | variables)


def training_job(job: dict[str, Any], yaml: Path, overrides: list[str], now: datetime) -> tuple[str, dict[str, Any]]:
    """Describe a job that starts or continues a run.

    Checkpoints go to the store directly, complete or not at all; SageMaker copies the rest of the run folder.

    Args:
        job: fields of CreateTrainingJob.
        yaml: configuration of the run.
        overrides: `key.sub=value` strings.
        now: part of the job's name.

    Returns:
        The name of the run, and the fields of CreateTrainingJob.

    Raises:
        ConfigurationError: job or run are wrong, or each host would see other files.
    """
    from diffusion.config.loading import load_config

    if not yaml.resolve().is_relative_to(ROOT):
        raise ConfigurationError(f"{yaml} is not in {ROOT}, so the image has no such file: put it into yamls/")
    try:
        store = job["OutputDataConfig"]["S3OutputPath"].rstrip("/")
        channels = {
            one["ChannelName"]: one["DataSource"].get("S3DataSource", {}) for one in job.get("InputDataConfig", ())
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            "the job needs OutputDataConfig.S3OutputPath, and ChannelName and DataSource for each of InputDataConfig"
        ) from error
    for name, source in channels.items():
        refuse_sharded_channel(name, source.get("S3DataDistributionType"))

    defaults = [f"{name}={value}" for name, value in default_overrides(CONTAINER, channels).items()]
    run = load_config(yaml, [*defaults, *overrides]).run_name
    if not re.fullmatch(r"(?!.{49})[a-zA-Z0-9](-*[a-zA-Z0-9])*", run):
        raise ConfigurationError(
            f"run_name={run}: names of jobs have letters, digits and hyphens, here at most 48; set another one"
        )
    folder = f"{store}/{run}"
    settings = dict(text.split("=", 1) for text in [f"trainer.checkpoint_folder={folder}/checkpoints", *overrides])
    settings = {name: json.dumps(value) if value.startswith('"') else value for name, value in settings.items()}
    entry = {"ContainerEntrypoint": ["python", "launchers/sagemaker.py"], "ContainerArguments": ["train"]}
    return run, {
        **job,
        "TrainingJobName": f"{run}-{now:%Y%m%d%H%M%S}",
        "AlgorithmSpecification": job.get("AlgorithmSpecification", {}) | entry,
        "HyperParameters": {"yaml": str(yaml.resolve().relative_to(ROOT))} | settings,
        "CheckpointConfig": {"S3Uri": f"{folder}/run", "LocalPath": str(CONTAINER / "checkpoints")},
    }


def find_job(sagemaker: Any, run: str) -> str | None:
    """Find the newest job of a run, if there is any."""
    pages = sagemaker.get_paginator("list_training_jobs").paginate(NameContains=run)
    names = [job["TrainingJobName"] for page in pages for job in page["TrainingJobSummaries"]]
    return max((name for name in names if re.fullmatch(rf"{re.escape(run)}-\d{{14}}", name)), default=None)


def known_job(sagemaker: Any, run: str) -> str:
    """Find the newest job of a run."""
    job = find_job(sagemaker, run)
    if job is None:
        raise ConfigurationError(f"{run} has no job in {sagemaker.meta.region_name}: correct the name or AWS_REGION")
    return job


def submit(sagemaker: Any, job: Path, yaml: Path, overrides: list[str]) -> None:
    """Start a job, unless one of the same run is active."""
    from diffusion.config.loading import read_yaml

    run, request = training_job(read_yaml(job), yaml, overrides, datetime.now(UTC))
    if (last := find_job(sagemaker, run)) is not None:
        state = sagemaker.describe_training_job(TrainingJobName=last)["TrainingJobStatus"]
        if state in ("InProgress", "Stopping"):
            raise ConfigurationError(f"{last} is {state}, and a run has one job at a time: stop {run}, or wait")
    sagemaker.create_training_job(**request)
    print(f"{request['TrainingJobName']}: {request['HyperParameters']['trainer.checkpoint_folder']}")


def status(sagemaker: Any, run: str) -> None:
    """Print what the newest job of a run does, and what is billed."""
    job = sagemaker.describe_training_job(TrainingJobName=known_job(sagemaker, run))
    print(f"{job['TrainingJobName']}: {job['TrainingJobStatus']}, {job['SecondaryStatus']}")
    for change in job.get("SecondaryStatusTransitions", ()):
        print(f"  {change['StartTime']:%Y-%m-%d %H:%M} {change['Status']}: {change.get('StatusMessage', '')}")
    if "FailureReason" in job:
        print(f"  {job['FailureReason']}")
    if "BillableTimeInSeconds" in job:
        hours = [job[name] / 3600 for name in ("BillableTimeInSeconds", "TrainingTimeInSeconds")]
        print("  {:.1f} hours billed per instance, of {:.1f}".format(*hours))


def logs(sagemaker: Any, cloudwatch: Any, run: str, since: float | None) -> None:
    """Print the output of all hosts by time."""
    job = known_job(sagemaker, run)
    start = {} if since is None else {"startTime": int((time.time() - since) * 1000)}
    pages = cloudwatch.get_paginator("filter_log_events").paginate(
        logGroupName=LOG_GROUP, logStreamNamePrefix=f"{job}/", **start
    )
    for event in (event for page in pages for event in page["events"]):
        host = event["logStreamName"].removeprefix(f"{job}/").rpartition("-")[0]
        print(f"{host}: {event['message'].rstrip()}")


def stop(sagemaker: Any, run: str) -> None:
    """Let the newest job of a run save and end."""
    job = known_job(sagemaker, run)
    sagemaker.stop_training_job(TrainingJobName=job)
    print(f"{job} saves and ends within two minutes; `submit` continues")


@contextmanager
def aws_errors() -> Iterator[None]:
    """Report what AWS, or its client, refuses as an error of the user."""
    from botocore.exceptions import BotoCoreError, ClientError, ParamValidationError

    try:
        yield
    except ParamValidationError as error:
        raise ConfigurationError(f"CreateTrainingJob: {error.kwargs['report']}") from error
    except ClientError as error:
        raise ConfigurationError(f"AWS refuses {error.operation_name}: {error.response['Error']['Message']}") from error
    except BotoCoreError as error:
        raise MachineError(f"AWS: {error}") from error


def main() -> None:
    """Run the command."""
    options = parse_arguments()
    if options.action == "train":
        train()
    import boto3

    with aws_errors():
        sagemaker = boto3.client("sagemaker")
        if options.action == "submit":
            submit(sagemaker, options.job, options.yaml, options.overrides)
        elif options.action == "status":
            status(sagemaker, options.run)
        elif options.action == "logs":
            logs(sagemaker, boto3.client("logs"), options.run, options.since)
        else:
            stop(sagemaker, options.run)


if __name__ == "__main__":
    raise SystemExit(run_command(main))
