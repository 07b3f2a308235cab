"""Ingredients of a user's own: the example of the page, and one with weights and a term of the loss."""

import re

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from diffusion.config.fields import Plugin
from diffusion.config.loading import load_config
from diffusion.config.model import ModelConfig
from diffusion.config.schema import Config
from diffusion.config.training import Device
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.loading import used_weights
from diffusion.models.build import build_model, load_weights
from diffusion.models.ingredients import Ingredient
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.planning.memory import parameter_counts
from diffusion.plugins import check_plugins
from diffusion.train import build_training_model
from tests.tools.training_runs import ROOT


class Brightness(Ingredient):
    """Predicts the mean of the noised latents."""

    part = "brightness"

    def build(self, network, text_encoder, *, is_meta=False):
        self.module = nn.Linear(network.config["in_channels"], 1)

    def values(self, call, noised):
        found = self.module(noised.mean(dim=(2, 3)))[:, 0]
        return {"brightness": (found - noised.mean(dim=(1, 2, 3))).square()}

    def loss(self, outputs):
        return {"brightness": 0.1 * outputs.values["brightness"].mean()}


class Darkness(Brightness):
    """The same in training only."""

    part = "darkness"
    serves_training_only = True

    def values(self, call, noised):
        return {"darkness": super().values(call, noised)["brightness"]}

    def loss(self, outputs):
        return {"darkness": -outputs.values["darkness"].mean()}


def build(*ingredients: Plugin) -> tuple[Config, LatentDiffusion]:
    config = load_config("tests/tools/toy.yaml", ["objective.min_snr_gamma=5"])
    config.model.ingredients = list(ingredients)
    model = build_training_model(config, Device.cpu)
    assert isinstance(model, LatentDiffusion)
    return config, model.train()


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        BatchKey.LATENT_MEAN: torch.randn(4, 4, 8, 8, generator=generator),
        BatchKey.LATENT_LOGVAR: torch.full((4, 4, 8, 8), -4.0),
        BatchKey.TOKEN_IDS: torch.randint(1, 2000, (4, 24), generator=generator),
        BatchKey.SAMPLE: torch.arange(4),
        BatchKey.SLOT: torch.arange(4),
    }


def test_the_example_of_the_page_is_the_loss(tmp_path, monkeypatch):
    code, example = re.findall(r"```(?:python|yaml)\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), re.S)
    (tmp_path / "huber.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (plugin,) = yaml.safe_load(example)["model"]["ingredients"]
    _, model = build(Plugin(**plugin))
    outputs = model(batch())
    loss = model.loss(outputs, batch())
    error = F.huber_loss(outputs.prediction, outputs.target, reduction="none", delta=0.1).mean(dim=(1, 2, 3))
    assert isinstance(loss, Tensor) and outputs.weight is not None
    assert torch.equal(loss, (error * outputs.weight).mean())
    assert not torch.allclose(loss, build()[1].loss(outputs, batch()))  # pyright: ignore
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_one_with_weights_and_a_term_is_trained_stored_and_planned():
    config, model = build(Plugin(path=f"{__name__}.Brightness"))
    plain_config, plain = build()
    terms = model.loss(model(batch()), batch())
    assert isinstance(terms, dict) and terms.keys() == {"diffusion", "brightness"}
    assert torch.equal(terms["diffusion"], plain.loss(plain(batch()), batch()))  # pyright: ignore
    terms["brightness"].backward()
    assert model.get_parameter("brightness.weight").grad is not None
    assert model.state_dict().keys() - plain.state_dict().keys() == {"brightness.weight", "brightness.bias"}
    assert model.eval_forward(batch()).values == {}
    load_weights(model, plain.state_dict(), "a phase without it")
    assert parameter_counts(config).trained == parameter_counts(plain_config).trained + 5


def test_one_that_serves_training_only_is_left_out_of_models_for_sampling():
    config, model = build(*(Plugin(path=f"{__name__}.{name}") for name in ("Brightness", "Darkness")))
    sampling = build_model(config.model, config.objective, resolution=64, seed=1, for_training=False)
    weights = model.state_dict()
    load_weights(sampling, used_weights(weights, config.model, sampling), "it")
    assert weights.keys() - sampling.state_dict().keys() == {"darkness.weight", "darkness.bias"}
    assert used_weights(weights, config.model, model).keys() == weights.keys()


def test_names_of_parts_and_terms_are_unique(monkeypatch):
    monkeypatch.setattr(Darkness, "part", "brightness")
    paths = [f"{__name__}.{name}" for name in ("Brightness", "Darkness")]
    with pytest.raises(ConfigurationError, match=r"called 'brightness'.*Darkness"):
        build(*(Plugin(path=path) for path in paths))
    monkeypatch.setattr(Darkness, "part", "darkness")
    monkeypatch.setattr(Darkness, "loss", lambda self, outputs: {"brightness": outputs.prediction.mean()})
    _, model = build(*(Plugin(path=path) for path in paths))
    with pytest.raises(ValueError, match="two terms of the loss are called brightness"):
        model.loss(model(batch()), batch())


def test_wrong_paths_are_found_before_the_start():
    with pytest.raises(ConfigurationError, match=r"model\.ingredients\.0\.path=huber\.Absent"):
        check_plugins(Config(model=ModelConfig(ingredients=[Plugin(path="huber.Absent")])))
