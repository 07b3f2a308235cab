"""Autoencoders on several ranks: killed and resumed."""

import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffusion.checkpointing.find import find_checkpoints
from diffusion.checkpointing.read import StoredState


def weights_and_moments(run: Path) -> dict[str, Tensor]:
    """All tensors of model and optimizer in the newest checkpoint."""
    newest = max(find_checkpoints(run / "checkpoints"), key=lambda path: path.stat().st_mtime_ns)
    content = StoredState(newest).read_below("")
    parts = ("state.model.", "state.optimizers.")
    return {name: value for name, value in content.items() if name.startswith(parts) and isinstance(value, Tensor)}


@pytest.mark.world_size(2)
def test_killed_and_resumed_it_has_the_same_weights_and_moments_to_the_bit(server, shapes, tmp_path):
    common = [
        f"data.local={shapes / 'prepared' / 'train'}",
        f"validation.local={shapes / 'prepared' / 'validation'}",
        "validation.num_samples=8",
        "autoencoder.adversarial_weight=0.1",
        "autoencoder.adversarial_start=1ba",
        "trainer.max_duration=5ba",
        "trainer.save_interval=3ba",
        "trainer.device_train_microbatch_size=4",
        "schedule.warmup=1ba",
        "data.num_workers=0",
    ]
    runs = {name: tmp_path / name for name in ("whole", "killed")}
    yaml = "yamls/tiny/autoencoder.yaml"
    plan = {name: [*common, f"output_folder={run}"] for name, run in runs.items()}
    server.train(2, [(yaml, plan["whole"])])
    kill = "plugins.callbacks=[{path: tests.tools.toys.SignalAt, arguments: {step: 4, number: 9}}]"
    assert -signal.SIGKILL in server.run(2, [(yaml, [*plan["killed"], kill])]).codes
    at_3 = weights_and_moments(runs["killed"])
    server.train(2, [(yaml, plan["killed"])])

    whole, killed = (weights_and_moments(run) for run in runs.values())
    assert whole.keys() == killed.keys() == at_3.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    judging = [
        name for name in whole if "discriminator" in name and name.endswith(("0.weight", "exp_avg", "exp_avg_sq"))
    ]
    assert {name.split(".")[1] for name in judging} == {"model", "optimizers"}
    assert not any(torch.equal(whole[name], at_3[name]) for name in judging)
    vaes = [{file.name: file.read_bytes() for file in (run / "vae").iterdir()} for run in runs.values()]
    assert vaes[0] == vaes[1]
