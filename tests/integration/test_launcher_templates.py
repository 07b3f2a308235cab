"""What lies in launchers/: scripts and the Dockerfile are linted, and what they start is something that can be run."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow.training import models
from kubernetes.client import models as kubernetes
from torch.distributed.run import parse_args

from diffusion.config.fields import check_sections
from diffusion.config.loading import load_complete, load_config
from diffusion.config.schema import Config
from diffusion.distributed import USER_ERROR_EXIT_CODE
from diffusion.evaluation.config import EvaluationConfig, run_label
from diffusion.operations.metrics import QUEUE
from diffusion.preparation.config import PrepareConfig
from scripts.ingest import parse_arguments
from tests.tools.forking import free_port
from tests.tools.training_runs import BIN, ROOT, environment

LAUNCHERS = ROOT / "launchers"
JOBSET = {
    "JobSet": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "JobSetSpec"},
    "JobSetSpec": {
        "failurePolicy": "JobSetFailurePolicy",
        "managedBy": "str",
        "replicatedJobs": "list[JobSetReplicatedJob]",
        "suspend": "bool",
        "ttlSecondsAfterFinished": "int",
    },
    "JobSetFailurePolicy": {"maxRestarts": "int", "restartStrategy": "str", "rules": "list[JobSetFailureRule]"},
    "JobSetFailureRule": {
        "action": "str",
        "name": "str",
        "onJobFailureMessagePatterns": "list[str]",
        "onJobFailureReasons": "list[str]",
        "targetReplicatedJobs": "list[str]",
    },
    "JobSetReplicatedJob": {"groupName": "str", "name": "str", "replicas": "int", "template": "V1JobTemplateSpec"},
}
"""Keys of a JobSet's own types: jobset.x-k8s.io/v1alpha2 (kubernetes-sigs/jobset, hack/python-sdk/swagger.json)."""

KEDA = {
    "ScaledJob": {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta", "spec": "ScaledJobSpec"},
    "ScaledJobSpec": {
        "envSourceContainerName": "str",
        "failedJobsHistoryLimit": "int",
        "jobTargetRef": "V1JobSpec",
        "maxReplicaCount": "int",
        "minReplicaCount": "int",
        "pollingInterval": "int",
        "rollout": "dict(str, str)",
        "scalingStrategy": "dict(str, str)",
        "successfulJobsHistoryLimit": "int",
        "triggers": "list[ScaledJobTrigger]",
    },
    "ScaledJobTrigger": {
        "authenticationRef": "dict(str, str)",
        "metadata": "PrometheusTrigger",
        "metricType": "str",
        "name": "str",
        "type": "str",
    },
    "PrometheusTrigger": dict.fromkeys(
        ("activationThreshold", "ignoreNullValues", "namespace", "query", "serverAddress", "threshold", "timeout"),
        "str",
    ),
}
"""Keys of a ScaledJob: keda.sh/v1alpha1 (keda.sh/docs, ScaledJob specification and Prometheus scaler)."""

SCRIPTS = [*sorted(LAUNCHERS.glob("*.sh")), LAUNCHERS / "slurm.sbatch"]


@pytest.mark.parametrize(("linter", "files"), [("shellcheck", SCRIPTS), ("hadolint", [LAUNCHERS / "Dockerfile"])])
def test_linters_have_no_complaints(linter, files):
    done = subprocess.run([BIN / linter, *files], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_image_has_all_that_the_package_is_made_from():
    text = (LAUNCHERS / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for name in line.split()[:-1]}
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    assert {"setup.py", "diffusion", "launchers", "run.py", "evaluate.py", "scripts", "yamls"} <= copied


def fields_of(kind: str) -> dict[str, str] | None:
    """Keys of a type and their types; None where it is not known."""
    if kind in JOBSET | KEDA:
        return (JOBSET | KEDA)[kind]
    model = getattr(models, kind, None) or getattr(kubernetes, kind, None)
    return model and {model.attribute_map[name]: entry for name, entry in model.openapi_types.items()}


def mistakes(value: Any, kind: str, place: str) -> list[str]:
    """Where a document differs from a type of Kubernetes or Kubeflow: unknown keys and values of another type."""
    if match := re.fullmatch(r"(list|dict)(?:\[|\(str, )(.*)[\])]", kind):
        if not isinstance(value, list if match[1] == "list" else dict):
            return [f"{place} is no {match[1]}"]
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return [text for name, entry in entries for text in mistakes(entry, match[2], f"{place}.{name}")]
    if kind in ("str", "int", "bool"):
        return [] if type(value).__name__ == kind else [f"{place} is no {kind}"]
    if (types := fields_of(kind)) is None:
        return []
    if not isinstance(value, dict):
        return [f"{place} is no {kind}"]
    unknown = [f"{place} has no {name}" for name in value.keys() - types.keys()]
    return unknown + [
        text for name in value.keys() & types.keys() for text in mistakes(value[name], types[name], f"{place}.{name}")
    ]


def test_the_job_for_kubernetes_is_what_the_operator_understands():
    job = yaml.safe_load((LAUNCHERS / "pytorchjob.yaml").read_text())
    assert mistakes(job, "KubeflowOrgV1PyTorchJob", "job") == []
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    [container] = worker["template"]["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in worker["template"]["spec"]["volumes"]
    }
    assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == job["spec"]["elasticPolicy"]["nProcPerNode"]
    assert job["spec"]["elasticPolicy"]["maxReplicas"] == worker["replicas"]
    config = resolved(container["args"])
    assert config.trainer.async_checkpoints
    assert config.data.local == "/cache/phase1"


def test_the_jobset_is_what_its_controller_and_kubernetes_understand():
    job = yaml.safe_load((LAUNCHERS / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert mistakes(job, "JobSet", "job") == []
    [replicated] = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert (pod["restartPolicy"], spec["completionMode"]) == ("Never", "Indexed"), "else it may have no failure policy"
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert rule["onExitCodes"]["values"] == [USER_ERROR_EXIT_CODE]
    launch = container["command"][2].partition("launchers/torchrun.py ")[2].replace("$JOB_COMPLETION_INDEX", "3")
    parsed = parse_args(shlex.split(launch))
    assert int(parsed.nnodes) == spec["completions"] == spec["parallelism"]
    assert parsed.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    name = job["metadata"]["name"]
    assert parsed.master_addr == f"{name}-{replicated['name']}-0-0.{name}"
    assert resolved(container["args"]).trainer.async_checkpoints


def test_the_ingestion_is_what_kubernetes_and_the_command_understand(tmp_path):
    settings, deployment = yaml.safe_load_all((LAUNCHERS / "ingest.yaml").read_text())
    assert mistakes(settings, "V1ConfigMap", "settings") == []
    assert mistakes(deployment, "V1Deployment", "deployment") == []
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]["type"]) == (1, "Recreate"), "a data set has one writer"
    pod = spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
    [container] = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert (ROOT / container["command"][1]).is_file()
    options = parse_arguments(container["args"])
    assert (options.config, options.interval) == (Path("/configuration/prepare.yaml"), 1800.0)
    [(name, text)] = settings["data"].items()
    (tmp_path / name).write_text(text)
    assert load_complete(PrepareConfig, tmp_path / name).buckets.preset == "sd2"


def test_mistakes_in_a_jobset_are_found():
    job = yaml.safe_load((LAUNCHERS / "jobset.yaml").read_text())
    job["spec"]["failurePolicy"]["rules"][0]["onJobFailureReason"] = "PodFailurePolicy"
    [replicated] = job["spec"]["replicatedJobs"]
    replicated["replicas"] = "1"
    replicated["template"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    replicated["template"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountpath"] = "/x"
    assert len(mistakes(job, "JobSet", "job")) == 4


def test_mistakes_in_a_job_are_found():
    job = yaml.safe_load((LAUNCHERS / "pytorchjob.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["restartpolicy"] = worker.pop("restartPolicy")
    worker["template"]["spec"]["containers"][0]["volumeMounts"][0]["mountpath"] = "/x"
    job["spec"]["elasticPolicy"]["maxRestarts"] = "100"
    assert len(mistakes(job, "KubeflowOrgV1PyTorchJob", "job")) == 3


def resolved(arguments: list[str]) -> Config:
    """What run.py makes of its arguments."""
    return load_config(ROOT / arguments[0], arguments[1:], may_miss=lambda key: True)


def evaluations(pods: list[dict[str, Any]]) -> list[EvaluationConfig]:
    """What evaluate.py makes of the arguments of pods; each volume is mounted."""
    configs = []
    for pod in pods:
        [container] = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert container["command"] == ["python", "evaluate.py"]
        yaml_file, *overrides = container["args"]
        configs.append(load_complete(EvaluationConfig, ROOT / yaml_file, overrides))
        check_sections(configs[-1])
    return configs


def test_evaluation_is_scaled_from_0_to_64_by_a_metric_that_watchers_expose():
    queue, scaled = yaml.safe_load_all((LAUNCHERS / "evaluation.yaml").read_text())
    assert mistakes(queue, "V1Deployment", "queue") + mistakes(scaled, "ScaledJob", "scaled") == []
    assert (scaled["apiVersion"], scaled["kind"]) == ("keda.sh/v1alpha1", "ScaledJob")
    spec, pod = scaled["spec"], queue["spec"]["template"]
    assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (0, 64)
    counting, working = evaluations([pod["spec"], spec["jobTargetRef"]["template"]["spec"]])
    assert counting.watch_only
    assert counting.loggers.prometheus is not None
    assert str(counting.loggers.prometheus.port) == pod["metadata"]["annotations"]["prometheus.io/port"]
    assert working.idle_seconds is not None, "a worker ends by itself"
    for config in (counting, working):
        assert config.watch
        assert (config.runs, config.output_folder) == (counting.runs, counting.output_folder)
        assert config.protocol == counting.protocol
    [trigger] = spec["triggers"]
    [(name, label)] = re.findall(r'(diffusion_\w+)\{run=~"([^"]+)"\}', trigger["metadata"]["query"])
    assert (trigger["type"], name, trigger["metadata"]["threshold"]) == ("prometheus", QUEUE, "1")
    assert label.split("|") == [run_label(uri) for uri in counting.runs]
    job = spec["jobTargetRef"]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "else it may have no failure policy"
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["values"] == [USER_ERROR_EXIT_CODE]


def test_torchrun_ends_with_the_code_of_the_rank_that_failed():
    program = 'if [ "$RANK" = 1 ]; then exit 2; else exec sleep 600; fi'
    options = ["--nproc-per-node=2", f"--master-port={free_port()}", "--no-python"]
    command = [BIN / "python", LAUNCHERS / "torchrun.py", *options, "bash", "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 2, done.stderr


def test_variables_that_are_set_stay_and_the_network_is_named_once():
    script = "source launchers/environment.sh; env"
    variables = {
        "PATH": "/usr/bin:/bin",
        "NETWORK_INTERFACE": "ens5",
        "NCCL_SOCKET_IFNAME": "ens",
        "NCCL_DEBUG": "INFO",
    }
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=variables, capture_output=True, text=True, check=True)
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert (shown["NCCL_SOCKET_IFNAME"], shown["GLOO_SOCKET_IFNAME"], shown["NCCL_DEBUG"]) == ("ens", "ens5", "INFO")
    assert shown["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
