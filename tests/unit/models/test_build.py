"""Models of notebooks: weights from a folder or the hub's cache, with the objective of their training."""

import json
import logging
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import close_session
from safetensors.torch import load_file, save_file

from diffusion import models
from diffusion.config.model import Architecture, FlowConfig, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.models import LatentDiffusion, build_model, tiny
from diffusion.models.architectures import TINY, build_vae
from diffusion.models.pretrained import SCHEDULER_CONFIG
from tests.tools.pipelines import write_model

HUB_NAME = "someone/pipe"


def change(file: Path, **entries) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.fixture(scope="module")
def epsilon() -> LatentDiffusion:
    return tiny(seed=5, prediction_type="epsilon")


@pytest.fixture(scope="module")
def folder(epsilon, tmp_path_factory) -> Path:
    """Trained with another prediction type than is usual with the family."""
    return write_model(epsilon, tmp_path_factory.mktemp("build") / "pipe")


@pytest.fixture
def changed(folder, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "changed"))


@pytest.fixture
def requests(monkeypatch) -> Iterator[list[str]]:
    """Names of other hosts that are asked, of which none is reached; threads of earlier tests ask this one."""
    asked, real = [], socket.getaddrinfo

    def look_up(host, *rest, **options):
        if host == "localhost":
            return real(host, *rest, **options)
        asked.append(host)
        raise socket.gaierror("no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        close_session()
        yield asked
    close_session()


@pytest.fixture
def cache(folder, tmp_path, monkeypatch) -> Path:
    """A cache of the hub that holds the folder, and no network."""
    repository, commit = tmp_path / "hub" / f"models--{HUB_NAME.replace('/', '--')}", "1234" * 10
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def reported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Messages of this package in the log; libraries log from threads and finalizers of other tests, too."""
    return [record.getMessage() for record in caplog.records if record.name.startswith("diffusion.")]


def are_equal(one: LatentDiffusion, other: LatentDiffusion) -> bool:
    modules = ((one.unet, other.unet), (one.vae, other.vae), (one.text_encoder, other.text_encoder))
    pairs = [zip(a.parameters(), b.parameters(), strict=True) for a, b in modules]
    return all(torch.equal(a, b) for pair in pairs for a, b in pair)


@pytest.mark.parametrize("kind", [Path, str])
def test_a_unet_keeps_the_prediction_type_of_its_folder(kind, folder, epsilon):
    loaded = tiny(kind(folder), network=kind(folder), vae=kind(folder / "vae"))
    assert are_equal(loaded, epsilon)
    assert loaded.objective.prediction_type == loaded.noise_scheduler.config["prediction_type"] == "epsilon"
    options = {"num_inference_steps": 2, "seed": 0, "output": "tensor", "progress": False}
    found, expected = (model.generate("a red circle", **options) for model in (loaded, epsilon))
    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert torch.equal(found, expected)


def test_rectified_flow_is_taken_from_the_folder(tmp_path):
    objective = ObjectiveConfig(prediction_type=PredictionType.flow, flow=FlowConfig(shift=3.0))
    model = build_model(ModelConfig(architecture=Architecture.tiny), objective, resolution=32, seed=17)
    path = str(write_model(model, tmp_path / "pipe"))
    loaded = tiny(path, network=path)
    assert (loaded.objective.prediction_type, loaded.objective.flow.shift) == (PredictionType.flow, 3.0)
    with pytest.raises(ConfigurationError, match="prediction_type"):
        tiny(path, network=path, prediction_type="epsilon")


def test_a_zero_terminal_schedule_is_taken_from_the_folder(tmp_path):
    path = str(write_model(tiny(zero_terminal_snr=True), tmp_path / "pipe"))
    loaded = tiny(path, network=path)
    assert loaded.objective.zero_terminal_snr
    assert loaded.noise_scheduler.alphas_cumprod[-1] == 0
    with pytest.raises(ConfigurationError, match="rescale_betas_zero_snr"):
        tiny(path, network=path, zero_terminal_snr=False)


def test_another_prediction_type_than_the_folder_s_is_rejected(folder):
    assert tiny(str(folder), network=str(folder), prediction_type="epsilon").objective.prediction_type == "epsilon"
    with pytest.raises(
        ConfigurationError,
        match=r"scheduler_config\.json: prediction_type",
    ):
        tiny(str(folder), network=str(folder), prediction_type="v_prediction")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"beta_end": 0.02}, "beta_end"),
        ({"trained_betas": [0.1]}, "trained_betas"),
    ],
)
def test_another_noise_schedule_than_the_family_s_is_rejected(entries, message, changed):
    change(changed / SCHEDULER_CONFIG, **entries)
    with pytest.raises(ConfigurationError, match=message):
        tiny(str(changed), network=str(changed))


def test_other_attention_heads_of_equal_shapes_are_rejected(changed):
    change(changed / "unet" / "config.json", attention_head_dim=[4, 4])
    with pytest.raises(ConfigurationError, match="attention_head_dim"):
        tiny(str(changed), network=str(changed))


def test_none_in_released_configurations_is_false(changed, epsilon):
    change(changed / "unet" / "config.json", upcast_attention=None, cross_attention_norm=None)
    assert are_equal(tiny(str(changed), network=str(changed)), epsilon)


def test_a_text_encoder_that_lacks_weights_is_rejected(changed):
    file = changed / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    del tensors["text_model.final_layer_norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ConfigurationError):
        tiny(changed)


def test_weights_of_another_size_are_rejected(changed):
    change(changed / "unet" / "config.json", block_out_channels=[32, 128])
    with pytest.raises(ConfigurationError, match="block_out_channels"):
        tiny(str(changed), network=str(changed))


def test_a_random_unet_beside_pretrained_parts_is_reported(folder, caplog):
    with caplog.at_level(logging.WARNING):
        tiny()
        tiny(str(folder), network=str(folder))
        assert not reported(caplog)
        tiny(str(folder))
    [message] = reported(caplog)
    assert str(folder) in message
    assert "network=" in message


def test_a_missing_prediction_type_is_reported(changed, caplog):
    (changed / SCHEDULER_CONFIG).unlink()
    with caplog.at_level(logging.WARNING):
        assert tiny(str(changed), network=str(changed)).objective.prediction_type == "v_prediction"
        tiny(str(changed), network=str(changed), prediction_type="epsilon")
    [message] = reported(caplog)
    assert SCHEDULER_CONFIG in message
    assert message.endswith("v_prediction")


def test_a_hub_name_is_served_from_the_cache(cache, epsilon):
    loaded = tiny(HUB_NAME, network=HUB_NAME)
    assert are_equal(loaded, epsilon)
    assert loaded.objective.prediction_type == "epsilon"
    with pytest.raises(ConfigurationError, match="someone/other/unet"):
        tiny(network="someone/other")


def test_with_local_files_only_the_hub_is_not_asked(cache, requests, epsilon):
    assert are_equal(tiny(HUB_NAME, network=HUB_NAME, local_files_only=True), epsilon)
    assert requests == []
    assert torch.equal(tiny(network=HUB_NAME).unet.conv_in.weight, epsilon.unet.conv_in.weight), (
        "what was fetched before"
    )
    assert requests, "without it the hub is asked"


def test_an_unavailable_hub_is_tried_once_and_reported_without_its_password(requests, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://me:planted@huggingface.co")
    start = time.monotonic()
    with pytest.raises(ConfigurationError, match=r"https://huggingface\.co") as caught:
        tiny("someone/other")
    assert "planted" not in str(caught.value)
    assert time.monotonic() - start < 20
    assert len(requests) == 1


def test_the_cache_suffices_without_the_hub(cache, requests, epsilon):
    loaded = tiny(HUB_NAME)
    pairs = zip(loaded.vae.parameters(), epsilon.vae.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert requests


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prediction_type": "foo"}, "prediction_type 'foo'"),
        ({"resolution": 30}, "resolution 30"),
        ({"resolution": 0}, "resolution 0"),
        ({"resolution": -32}, "resolution -32"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**32}, "seed 4294967296"),
        ({"network": "./nowhere"}, r"\./nowhere"),
        ({"pretrained": Path("/no/where")}, "/no/where"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ConfigurationError, match=message):
        tiny(**options)


@pytest.mark.parametrize("architecture", Architecture)
def test_a_family_on_the_meta_device_takes_no_memory(architecture):
    with torch.device("meta"):
        model = getattr(models, architecture.value)()
    parts = [model, *model.frozen_parts]
    tensors = [tensor for part in parts for tensor in (*part.parameters(), *part.buffers())]
    assert len(tensors) > 80
    assert all(tensor.is_meta for tensor in tensors)


@pytest.mark.parametrize("architecture", [Architecture.tiny, Architecture.tiny_xl, Architecture.tiny_transformer])
def test_weights_loaded_after_the_meta_device_give_the_same_losses(architecture):
    family = getattr(models, architecture.value)
    expected = family(seed=5)
    with torch.device("meta"):
        model = family(seed=5)
    model.to_empty(device="cpu").load_state_dict(expected.state_dict())
    for part, loaded in zip(model.frozen_parts, expected.frozen_parts, strict=True):
        part.load_state_dict(loaded.state_dict())
        for buffer, value in zip(part.buffers(), loaded.buffers(), strict=True):
            buffer.copy_(value)  # Positions of the text encoder are in no state dict.
    batch = {
        BatchKey.IMAGE: torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8),
        BatchKey.TOKEN_IDS: torch.randint(1, 2000, (3, 24)),
        BatchKey.SAMPLE: torch.arange(3),
        BatchKey.PLACEMENT: torch.tensor([[32, 32, 0, 0, 32, 32]] * 3),
    }
    losses = [one.loss(one.forward(batch), batch) for one in (model, expected)]
    assert torch.equal(*losses)


def test_predictions_with_other_channels_than_the_latents_are_rejected():
    config = ModelConfig(architecture=Architecture.tiny, network={"out_channels": 1})
    with pytest.raises(ConfigurationError, match=r"model\.network\.out_channels is 1"):
        build_model(config, ObjectiveConfig(), resolution=32, seed=17)


def test_the_default_size_is_that_of_the_weights(changed, tmp_path):
    change(changed / "unet" / "config.json", sample_size=16)
    assert tiny(changed, network=changed).resolution == 64
    assert tiny(changed, network=changed, resolution=32).resolution == 32
    folder = write_model(models.tiny_transformer(), tmp_path / "transformer", resolution=48)
    assert models.tiny_transformer(folder, network=folder).resolution == 48


def test_the_size_is_a_multiple_of_the_factor_of_the_vae(tmp_path):
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    build_vae(TINY, blocks | {"block_out_channels": [16, 32]}).save_pretrained(tmp_path)
    assert tiny(vae=tmp_path, resolution=34).side_factor == 2
    with pytest.raises(ConfigurationError, match="resolution 33: give a multiple of 2"):
        tiny(vae=tmp_path, resolution=33)
