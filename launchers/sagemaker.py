"""Train on SageMaker in a custom container: `ENTRYPOINT ["python", "launchers/sagemaker.py"]`.

SageMaker describes the hosts and the hyperparameters in `/opt/ml/input/config`. The hyperparameter `yaml` names the
configuration, all others are its keys. The run folder is `/opt/ml/checkpoints`. SageMaker syncs it with the store of
`CheckpointConfig`, so an interrupted job continues. The data channel `train`, if there is one, is `data.local`. A
stopped job gets SIGTERM, which torchrun forwards.
"""

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PORT = 29500


def command(root: Path, ranks_per_host: str) -> tuple[list[str], dict[str, str]]:
    """Build the command of this host.

    Args:
        root: `/opt/ml`.
        ranks_per_host: a number, or `gpu`: one for each GPU.

    Returns:
        The command and its environment variables.
    """
    config = root / "input" / "config"
    resources = json.loads((config / "resourceconfig.json").read_text(encoding="utf-8"))
    hyperparameters = json.loads((config / "hyperparameters.json").read_text(encoding="utf-8"))
    # All values are strings; the SDKs put quotes around original strings.
    settings = {name: value.strip('"') for name, value in hyperparameters.items()}
    hosts = sorted(resources["hosts"])
    overrides = {"output_folder": str(root / "checkpoints")}
    if (channel := root / "input" / "data" / "train").is_dir():
        overrides["data.local"] = str(channel)
    yaml = settings.pop("yaml")
    overrides |= settings
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


def main() -> None:
    """Replace this process by torchrun."""
    arguments, variables = command(Path("/opt/ml"), os.environ.get("SM_NUM_GPUS", "gpu"))
    os.chdir(ROOT)
    source = 'source launchers/environment.sh && exec "$@"'
    os.execvpe("bash", ["bash", "-c", source, "bash", *arguments], os.environ | variables)


if __name__ == "__main__":
    main()
