"""Autoencoders on several ranks, killed and resumed; initial weights."""

import signal
from pathlib import Path

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from diffusion.checkpointing.find import find_checkpoints
from diffusion.checkpointing.read import StoredState
from diffusion.config.loading import load_config
from diffusion.config.training import Device
from diffusion.formats.run_folder import TRAIN_LOSS, read_metrics, series
from diffusion.models.pretrained import load_pretrained
from diffusion.train import build_training_model
from tests.tools.runs import signal_at

pytestmark = pytest.mark.slow


def weights_and_moments(run: Path) -> dict[str, Tensor]:
    """All tensors of model and optimizer in the newest checkpoint."""
    newest = max(find_checkpoints(run / "checkpoints"), key=lambda path: path.stat().st_mtime_ns)
    content = StoredState(newest).read_below("")
    parts = ("state.model.", "state.optimizers.")
    return {name: value for name, value in content.items() if name.startswith(parts) and isinstance(value, Tensor)}


@pytest.mark.world_size(2)
def test_killed_and_resumed_it_has_the_same_weights_and_moments_to_the_bit(server, shapes, tmp_path):
    yaml = "yamls/tiny/autoencoder_equivariance.yaml"
    common = [
        "autoencoder.equivariance.min_scale=0.75",
        f"init_from.checkpoint={shapes}",
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
        "optimizer.name=muon",
    ]
    runs = {name: tmp_path / name for name in ("whole", "killed", "alone")}
    plan = {name: [*common, f"output_folder={run}"] for name, run in runs.items()}
    server.train(2, [(yaml, plan["whole"])])
    assert -signal.SIGKILL in server.run(2, [(yaml, [*plan["killed"], signal_at(4)])]).codes
    at_3 = weights_and_moments(runs["killed"])
    server.train(2, [(yaml, plan["killed"])])
    server.train(1, [(yaml, plan["alone"])])

    whole, killed = (weights_and_moments(runs[name]) for name in ("whole", "killed"))
    assert whole.keys() == killed.keys() == at_3.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)
    judging = [
        name for name in whole if "discriminator" in name and name.endswith(("0.weight", "exp_avg", "exp_avg_sq"))
    ]
    assert {name.split(".")[1] for name in judging} == {"model", "optimizers"}
    assert not any(torch.equal(whole[name], at_3[name]) for name in judging)
    steps = {name.split(".")[4]: value.item() for name, value in whole.items() if name.endswith(".step")}
    assert steps == {"vae": 5, "discriminator": 4}
    vaes = [{file.name: file.read_bytes() for file in (runs[n] / "vae").iterdir()} for n in ("whole", "killed")]
    assert vaes[0] == vaes[1]
    losses = [series(read_metrics(runs[name] / "metrics.jsonl"), TRAIN_LOSS)[1] for name in ("whole", "alone")]
    assert len(losses[0]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_new_run_starts_from_the_vae_of_a_folder(shapes):
    overrides = [f"data.local={shapes}", f"validation.local={shapes}", f"init_from.checkpoint={shapes}"]
    config = load_config("yamls/tiny/autoencoder_equivariance.yaml", overrides)
    expected = load_pretrained(AutoencoderKL, str(shapes / "vae"), None, local_files_only=True).state_dict()
    built = {is_new: build_training_model(config, Device.cpu, is_new=is_new).vae for is_new in (True, False)}
    assert all(torch.equal(tensor, expected[name]) for name, tensor in built[True].state_dict().items())
    assert not torch.equal(built[False].decoder.conv_in.weight, expected["decoder.conv_in.weight"])
