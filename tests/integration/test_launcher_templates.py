"""What lies in launchers/: scripts and the Dockerfile are linted, and what they start is something that can be run."""

import hashlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml
from docker.utils.build import exclude_paths
from kubeflow.training import models
from kubernetes.client import models as kubernetes
from kubernetes.utils.quantity import parse_quantity
from torch.distributed.run import parse_args

from diffusion.config.fields import check_sections, parse_size
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


def instructions(name: str) -> list[str]:
    """Read the arguments of all instructions of a kind in the Dockerfile."""
    lines = re.sub(r"^#.*\n", "", (LAUNCHERS / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.partition(" ")[2] for line in lines.splitlines() if line.startswith(f"{name} ")]


def copied_names() -> set[str]:
    """List the files and folders that the Dockerfile copies."""
    return {name for line in instructions("COPY") for name in line.split()[:-1]}


def test_the_image_has_all_that_the_package_is_made_from():
    copied = copied_names()
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    assert {"setup.py", "diffusion", "launchers", "run.py", "evaluate.py", "scripts", "yamls"} <= copied


def test_the_image_is_built_on_a_digest_and_runs_as_a_user():
    assert [re.search(r"@sha256:[0-9a-f]{64}$", base) is not None for base in instructions("FROM")] == [True]
    uid = re.findall(r"useradd .*?--uid (\d+)", " ".join(instructions("RUN")))
    assert instructions("USER")[-1].split(":") == uid * 2
    assert int(uid[0]) > 0


def test_the_build_sees_what_it_copies_and_nothing_else(tmp_path):
    names = {name: name if (ROOT / name).is_file() else f"{name}/file.py" for name in copied_names()}
    folders = [".git", ".venv", ".venv-311", ".ruff_cache", "runs", "data", "wandb", "shared", "notebooks"]
    folders += ["diffusion/__pycache__", "scripts/folder/__pycache__"]
    junk = [".env", "requirements.in", *(f"{folder}/file" for folder in folders)]
    for path in (tmp_path / name for name in (*names.values(), *junk)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    seen = exclude_paths(str(tmp_path), [line for line in lines if line and not line.startswith("#")])
    assert {name for name in seen if (tmp_path / name).is_file()} == set(names.values())


def write_wheel(folder: Path, name: str, version: str, *requires: str) -> str:
    """Write a package without modules; returns its line in a lock."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Requires-Dist: {requirement}" for requirement in requires]
    with ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(lines))
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def install_as_image(project: Path, extras: str | None) -> tuple[set[str], str]:
    """Run the Dockerfile's installation on another project.

    Returns:
        Installed packages with their versions, and the messages.
    """
    [line] = [part for run in instructions("RUN") for part in run.split("&&") if "uv pip install" in part]
    [default] = [value for name, _, value in (line.partition("=") for line in instructions("ARG")) if name == "EXTRAS"]
    site = Path(tempfile.mkdtemp(dir=project))
    variables = os.environ | {"EXTRAS": extras or default, "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(project / "wheels")}
    variables["PATH"] = f"{BIN}:{os.environ['PATH']}"
    command = line.replace("--system", f"--python {BIN / 'python'} --target {site}")
    done = subprocess.run(["bash", "-c", command], cwd=project, env=variables, capture_output=True, text=True)
    return {path.stem for path in site.glob("*.dist-info")}, done.stderr


def test_the_image_gets_locked_versions_of_the_chosen_extras_and_rejects_other_files(tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    lock = [write_wheel(wheels, name, "1.0") for name in ("scores", "clusters")]
    lock += [write_wheel(wheels, "capped", "1.0", "array<2"), write_wheel(wheels, "array", "2.0")]
    write_wheel(wheels, "array", "1.0")
    write_wheel(wheels, "array", "3.0")
    write_wheel(tmp_path, "project", "1.0")
    extras = dict.fromkeys(metadata("diffusion").get_all("Provides-Extra") or [], "[]")
    extras |= {"evaluation": "['scores']", "ray": "['clusters']"}
    (tmp_path / "pyproject.toml").write_text(
        "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
        "[project]\nname = 'project'\nversion = '1.0'\ndependencies = ['capped']\n"
        "[project.optional-dependencies]\n" + "\n".join(f"{name} = {value}" for name, value in extras.items())
    )
    wheel = "project-1.0-py3-none-any.whl"
    (tmp_path / "backend.py").write_text(
        f"import shutil\ndef build_editable(folder, *_):\n    shutil.copy('{wheel}', folder)\n    return '{wheel}'\n"
    )
    (tmp_path / "overrides.txt").write_text("array>=2\n")
    (tmp_path / "requirements.txt").write_text(
        "".join(lock) + f"absent==1.0 ; sys_platform == 'win32' --hash=sha256:{'0' * 64}\n"
    )
    always = {"project-1.0", "capped-1.0", "array-2.0"}
    assert install_as_image(tmp_path, None)[0] == always | {"scores-1.0"}
    assert "clusters-1.0" in install_as_image(tmp_path, "evaluation,lora,metrics,ray,huggingface")[0]
    (tmp_path / "requirements.txt").write_text(re.sub("sha256:.{8}", "sha256:00000000", "".join(lock)))
    assert "Hash mismatch" in install_as_image(tmp_path, "lora")[1]


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


def outlives_a_pod(pod: dict[str, Any], folder: str) -> bool:
    """Return whether a folder of the container lies on a claim."""
    claimed = {volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume}
    [container] = pod["containers"]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in claimed]
    return any(Path(folder).is_relative_to(mount) for mount in mounts)


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
    [cache] = [variable["value"] for variable in container["env"] if variable["name"] == "TORCHINDUCTOR_CACHE_DIR"]
    assert outlives_a_pod(worker["template"]["spec"], cache)
    config = resolved(container["args"])
    assert config.trainer.async_checkpoints
    assert config.data.local == "/cache/phase1"
    assert config.data.cache_limit is not None


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
    [cache] = [variable["value"] for variable in container["env"] if variable["name"] == "TORCHINDUCTOR_CACHE_DIR"]
    assert outlives_a_pod(pod, cache)
    config = resolved(container["args"])
    assert config.trainer.async_checkpoints
    assert config.data.cache_limit is not None


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
    [(name, text)] = settings["data"].items()
    (tmp_path / name).write_text(text)
    options = parse_arguments([word.replace("/configuration", str(tmp_path)) for word in container["args"]])
    assert (options.config, options.interval) == (tmp_path / name, 1800.0)
    assert load_complete(PrepareConfig, options.config).buckets.preset == "sd2"


def pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """Find the specifications of pods at any depth of a document."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from pod_specs(entry)


PODS = [
    pytest.param(pod, id=f"{path.stem}-{document['kind']}")
    for path in sorted(LAUNCHERS.glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
    for pod in pod_specs(document)
]


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_runs_as_the_image_s_user_with_no_right_that_it_does_not_need(pod):
    uid, gid = map(int, instructions("USER")[-1].split(":"))
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (uid, gid, gid)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert not any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC"))
    allowed = {"name", "configMap", "emptyDir", "persistentVolumeClaim"}
    assert {name for volume in pod["volumes"] for name in volume} <= allowed, "no hostPath"
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_has_limits_and_can_write_to_home_and_tmp(pod):
    empty = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume}
    sizes = {name: parse_quantity(settings["sizeLimit"]) for name, settings in empty.items()}
    in_memory = sum(sizes[name] for name, settings in empty.items() if settings.get("medium") == "Memory")
    home = dict(entry.split("=") for entry in instructions("ENV")[-1].split())["HOME"]
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        resources = container["resources"]
        limit = parse_quantity(resources["limits"]["memory"])
        assert in_memory < limit / 2, "files in /dev/shm count as memory of the container"
        assert parse_quantity(resources["requests"].get("memory", limit)) <= limit
        assert parse_quantity(resources["requests"]["cpu"]) > 0
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert {mounts[home], mounts["/tmp"]} <= sizes.keys(), "the rest of the file system is read-only"
        for argument in container["args"]:
            if argument.startswith("data.cache_limit="):
                assert sizes[mounts["/cache"]] > parse_size(argument.partition("=")[2], "data.cache_limit")


def resolved(arguments: list[str]) -> Config:
    """What run.py makes of its arguments."""
    return load_config(ROOT / arguments[0], arguments[1:], may_lack=lambda key: True)


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


def test_hosts_may_stand_on_lines_of_their_own_and_get_the_variables(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/bash\necho "${@: -2:1}" $(grep -o "env .* launchers" <<< "${@: -1}")\n')
    ssh.chmod(0o755)
    command = [LAUNCHERS / "ssh.sh", "first\nsecond third\n", "tests/tools/toy.yaml"]
    variables = {"SSH": str(ssh), "NETWORK_INTERFACE": "ens5", "BIN": "/opt/a venv/bin"}
    done = subprocess.run(command, env=environment() | variables, capture_output=True, text=True, check=True)
    passed = r"env NETWORK_INTERFACE=ens5 BIN=/opt/a\ venv/bin launchers"
    assert sorted(done.stdout.splitlines()) == [f"{host} {passed}" for host in ("first", "second", "third")]
