"""Ingredients of a user's own: the example of the page, and one with weights and a term of the loss."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from diffusion.config.fields import Plugin
from diffusion.config.frozen import FrozenPaths
from diffusion.config.loading import load_config, to_yaml
from diffusion.config.model import InitFromConfig, ModelConfig
from diffusion.config.schema import Config, Task
from diffusion.config.training import Device
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError, DataError
from diffusion.evaluation.generate import EvaluatedModel, WeightsError, load_generator
from diffusion.evaluation.protocol import Number, Result
from diffusion.export import export
from diffusion.loading import check_objective, load_config_of, load_model, used_weights
from diffusion.models.architectures import TINY, build_vae
from diffusion.models.build import build_model, load_weights
from diffusion.models.ingredients import Ingredient
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.networks import text_width_of
from diffusion.operations.checks.machine import find_demand
from diffusion.planning.memory import activation_bytes, largest_size, parameter_counts
from diffusion.plugins import check_plugins
from diffusion.train import build_training_model
from tests.tools.latent_models import latent_batch
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


class Length(Ingredient):
    """Conditions on the length of the caption."""

    part = "length"

    def __init__(self, *, reads_values=False):
        self._reads_values = reads_values

    def build(self, network, text_encoder, *, is_meta=False):
        self.module = nn.Linear(1, text_width_of(network))

    def condition(self, conditioning, call):
        if not call.batch:
            return conditioning
        length = (call.batch[BatchKey.TOKEN_IDS] != 0).sum(1, keepdim=True).float()
        if self._reads_values:
            length /= float(length.max())
        return conditioning._replace(text=conditioning.text + self.module(length)[:, None])


def build(*ingredients: Plugin) -> tuple[Config, LatentDiffusion]:
    config = load_config("tests/tools/toy.yaml", ["objective.min_snr_gamma=5"])
    config.model.ingredients = list(ingredients)
    model = build_training_model(config, Device.cpu)
    assert isinstance(model, LatentDiffusion)
    return config, model.train()


def batch() -> dict[str, Tensor]:
    return latent_batch(4) | {BatchKey.SLOT: torch.arange(4)}


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


@pytest.mark.parametrize("reads_values", [False, True])
def test_one_that_reads_the_batch_is_planned_or_its_activations_are_unknown(reads_values):
    config, model = build(Plugin(path=f"{__name__}.Length", arguments={"reads_values": reads_values}))
    model.sample_errors(model(batch())).sum().backward()
    assert model.get_parameter("length.weight").grad is not None
    demand = find_demand(config, Device.gpu, num_ranks=1, ranks_per_node=1)
    assert demand.gpu_bytes is not None and demand.gpu_bytes > demand.checkpoint_bytes
    assert (activation_bytes(config, largest_size(config)) is None) == reads_values


def test_one_that_serves_training_only_is_left_out_of_models_for_sampling():
    config, model = build(*(Plugin(path=f"{__name__}.{name}") for name in ("Brightness", "Darkness")))
    sampling = build_model(config.model, config.objective, resolution=64, seed=1, for_training=False)
    weights = model.state_dict()
    load_weights(sampling, used_weights(weights, config.model, sampling), "it")
    assert weights.keys() - sampling.state_dict().keys() == {"darkness.weight", "darkness.bias"}
    assert used_weights(weights, config.model, model).keys() == weights.keys()


def test_an_error_that_is_not_one_of_each_sample_is_named(monkeypatch):
    monkeypatch.setattr(Brightness, "error", lambda self, error, outputs: outputs.prediction - outputs.target)
    _, model = build(Plugin(path=f"{__name__}.Brightness"))
    with pytest.raises(ConfigurationError, match=r"Brightness\.error returned \[4, 4, 8, 8\], not a tensor of \[4\]"):
        model.loss(model(batch()), batch())


def test_names_of_parts_and_terms_are_unique(monkeypatch):
    monkeypatch.setattr(Darkness, "part", "brightness")
    paths = [f"{__name__}.{name}" for name in ("Brightness", "Darkness")]
    with pytest.raises(ConfigurationError, match=r"called 'brightness'.*Darkness"):
        build(*(Plugin(path=path) for path in paths))
    monkeypatch.setattr(Darkness, "part", "darkness")
    for term in ("brightness", "total"):
        monkeypatch.setattr(Darkness, "loss", lambda self, outputs, term=term: {term: outputs.prediction.mean()})
        _, model = build(*(Plugin(path=path) for path in paths))
        with pytest.raises(ConfigurationError, match=f"a term of the loss is called {term} already"):
            model.loss(model(batch()), batch())


def test_names_of_values_and_frozen_parts_are_unique(monkeypatch):
    plugins = [Plugin(path=f"{__name__}.{name}") for name in ("Brightness", "Darkness")]
    for names in ({"vae"}, {"tokenizer"}):
        monkeypatch.setattr(Darkness, "frozen", dict.fromkeys(names, nn.Identity()))
        with pytest.raises(ConfigurationError, match=f"frozen part is called {names.pop()} already.*Darkness"):
            build(*plugins)
    monkeypatch.setattr(Darkness, "frozen", {})
    for values, message in (
        (Brightness.values, "is called brightness already.*Darkness"),
        (print, "Darkness gives None"),
    ):
        monkeypatch.setattr(Darkness, "values", values)
        with pytest.raises(ConfigurationError, match=message):
            build(*plugins)[1](batch())


@pytest.mark.parametrize("part", ["", "a.b", "seed", "frozen", "unet"])
def test_an_impossible_part_is_refused_with_its_class(monkeypatch, part):
    monkeypatch.setattr(Darkness, "part", part)
    with pytest.raises(ConfigurationError, match=rf"called '{re.escape(part)}'.*Darkness"):
        build(Plugin(path=f"{__name__}.Darkness"))


def test_validation_has_no_terms():
    _, model = build(Plugin(path=f"{__name__}.Brightness"))
    assert isinstance(model.loss(model.eval_forward(batch()), batch()), Tensor)


def test_wrong_paths_are_found_before_the_start():
    with pytest.raises(ConfigurationError, match=r"model\.ingredients\.0\.path=huber\.Absent"):
        check_plugins(Config(model=ModelConfig(ingredients=[Plugin(path="huber.Absent")])))


def stored(run: Path, config: Config, weights: dict[str, Tensor]) -> list[Path]:
    """Write a checkpoint and a file of an average."""
    checkpoint, average = run / "ep0-ba1.pt", run / "averages" / "own.safetensors"
    average.parent.mkdir(parents=True)
    states = {"RunRecord": {"config": to_yaml(config)}}
    torch.save({"state": {"callbacks": states, "model": weights}}, checkpoint)
    (run / "config.yaml").write_text(to_yaml(config))
    save_file(weights, average)
    return [checkpoint, average]


def test_nothing_that_a_checkpoint_names_is_run_or_read_unless_the_user_names_it(tmp_path, monkeypatch):
    proof, (config, model) = tmp_path / "proof", build()
    touch = Plugin(path="subprocess.getoutput", arguments={"cmd": f"touch {proof}"})
    monkeypatch.setenv("SECRET_OF_USER", "planted")
    config.run_name, config.model.ingredients = "${oc.env:SECRET_OF_USER}", [touch]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for path in stored(tmp_path / "evil", config, weights):
        assert load_config_of(path).run_name == config.run_name
        for use in (load_model, lambda path: export(str(path), tmp_path / "out")):
            with pytest.raises(ConfigurationError, match=r"ingredients subprocess\.getoutput"):
                use(path)
    with pytest.raises(ConfigurationError, match="no subclass"):
        build(touch)
    here, _ = build()
    here.init_from = InitFromConfig(checkpoint=str(tmp_path / "evil" / "ep0-ba1.pt"))
    for name, value in build_training_model(here, Device.cpu).state_dict().items():
        assert torch.equal(value, weights[name])
    assert not proof.exists()


def test_weights_that_are_not_finite_give_no_images_and_no_export(tmp_path):
    config, model = build()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights["unet.conv_in.bias"][0] = torch.nan
    for number, path in enumerate(stored(tmp_path, config, weights)):
        evaluated = EvaluatedModel(name="", path=str(path), step=None, weights="")
        with pytest.raises(WeightsError, match=r"unet\.conv_in\.bias.*NaN"):
            load_generator(evaluated, torch.device("cpu"))
        with pytest.raises(DataError, match="NaN"):
            export(str(path), tmp_path / f"out-{number}")


def test_ones_that_the_user_names_are_built_from_a_checkpoint(tmp_path):
    path = f"{__name__}.Brightness"
    config, model = build(Plugin(path=path))
    nn.init.ones_(model.get_parameter("brightness.weight"))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for file in stored(tmp_path, config, weights):
        found = load_model(file, paths=FrozenPaths(ingredients=[path]))
        assert torch.equal(found.get_parameter("brightness.weight"), weights["brightness.weight"])
    config.init_from = InitFromConfig(checkpoint=str(tmp_path / "ep0-ba1.pt"))
    found = build_training_model(config, Device.cpu)
    assert torch.equal(found.get_parameter("brightness.weight"), weights["brightness.weight"])


def test_initial_weights_leave_out_what_is_not_named(tmp_path):
    config, model = build(*(Plugin(path=f"{__name__}.{name}") for name in ("Brightness", "Darkness")))
    weights = {name: value + 1 for name, value in model.state_dict().items()}
    checkpoint, _ = stored(tmp_path, config, weights)
    here, _ = build(Plugin(path=f"{__name__}.Brightness"))
    here.init_from = InitFromConfig(checkpoint=str(checkpoint))
    found = build_training_model(here, Device.cpu).state_dict()
    assert weights.keys() - found.keys() == {"darkness.weight", "darkness.bias"}
    assert all(torch.equal(weights[name], value) for name, value in found.items())


@pytest.mark.parametrize("out", ["out", "out.safetensors"])
def test_an_ingredient_that_an_export_would_leave_out_is_refused(tmp_path, out):
    path = f"{__name__}.Brightness"
    config, model = build(Plugin(path=path))
    checkpoint, _ = stored(tmp_path, config, model.state_dict())
    with pytest.raises(ConfigurationError, match="leave out Brightness: define merged or exported"):
        export(str(checkpoint), tmp_path / out, paths=FrozenPaths(ingredients=[path]))


def test_what_is_no_run_of_a_diffusion_model_is_named(tmp_path):
    config, _ = build()
    checkpoint, _ = stored(tmp_path / "diffusion", config, {"unet.conv_in.bias": torch.zeros(1)})
    with pytest.raises(DataError, match=r"no averages .* no weights 'average': choose raw"):
        load_model(checkpoint, weights="average")
    config.task = Task.autoencoder
    for path in stored(tmp_path / "vae", config, {"vae.bias": torch.zeros(1)}):
        with pytest.raises(ConfigurationError, match="a run of autoencoder"):
            load_model(path)
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="is a model folder"):
        load_model(tmp_path)


class Waves(Brightness):
    """Scales the mean by a random constant."""

    def build(self, network, text_encoder, *, is_meta=False):
        super().build(network, text_encoder)
        self.module.register_buffer("scale", torch.randn(()))


def test_an_average_has_the_buffers_of_its_run(tmp_path):
    path = f"{__name__}.Waves"
    config, model = build(Plugin(path=path))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights["brightness.scale"].fill_(7)
    _, average = stored(tmp_path, config, weights)
    save_file({name: value for name, value in weights.items() if name != "brightness.scale"}, average)
    assert load_model(average, paths=FrozenPaths(ingredients=[path])).get_buffer("brightness.scale") == 7


def test_initial_weights_mean_what_they_meant_in_their_training(tmp_path):
    scores = "model.score_conditioning={columns: [{name: a}, {name: b, mean: 2}]}"
    turned = "model.score_conditioning={columns: [{name: b, mean: 2}, {name: a}]}"

    def model(*overrides: str) -> nn.Module:
        return build_training_model(load_config("tests/tools/toy.yaml", overrides), Device.cpu)

    weights = {name: value.clone() for name, value in model(scores).state_dict().items()}
    stored(tmp_path, load_config("tests/tools/toy.yaml", [scores]), weights)
    start = f"init_from.checkpoint={tmp_path / 'ep0-ba1.pt'}"
    changes = {
        "act_fn is silu there and gelu here.*model.network": [scores, "model.network.act_fn=gelu"],
        "model.score_conditioning takes": [scores.replace("mean: 2", "mean: 3")],
        "model.score_conditioning takes .*b.*a.*here": [turned],
    }
    for message, others in changes.items():
        with pytest.raises(ConfigurationError, match=message):
            model(start, *others)
    found = model(start, scores, "model.score_conditioning.dropout=0.3").state_dict()
    assert all(torch.equal(found[name], value) for name, value in weights.items())


LINEAR = {"prediction_type": "v_prediction", "beta_schedule": "linear", "beta_start": 0.00085, "beta_end": 0.012}


@pytest.mark.parametrize(
    ("scheduler", "message", "remedy"),
    [
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
            "prediction_type is v_prediction, but flow",
            "objective.prediction_type=flow",
        ),
        (LINEAR, "beta_schedule is linear there", "init_from.new_objective=true"),
    ],
)
def test_a_published_folder_is_not_continued_with_another_objective(tmp_path, scheduler, message, remedy):
    (tmp_path / "scheduler").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    (tmp_path / "scheduler/scheduler_config.json").write_text(json.dumps(scheduler))
    start = f"init_from.checkpoint={tmp_path}"
    with pytest.raises(ConfigurationError, match=message):
        check_objective(load_config("tests/tools/toy.yaml", [start]))
    check_objective(load_config("tests/tools/toy.yaml", [start, remedy]))


def test_the_default_size_of_an_export_is_that_of_training_with_another_vae(tmp_path):
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    blocks |= {"block_out_channels": [16, 32]}
    build_vae(TINY, blocks).save_pretrained(tmp_path / "vae")
    config = load_config("tests/tools/toy.yaml", [f"model.vae={tmp_path / 'vae'}"])
    checkpoint, _ = stored(tmp_path, config, build_training_model(config, Device.cpu).state_dict())
    export(str(checkpoint), tmp_path / "out")
    assert json.loads((tmp_path / "out/unet/config.json").read_text())["sample_size"] == config.data.resolution // 2


def test_one_file_is_not_for_a_network_with_a_text_adapter(tmp_path):
    config = load_config("tests/tools/toy.yaml", ["model.text_adapter={layers: 1}"])
    checkpoint, _ = stored(tmp_path, config, {"unet.conv_in.bias": torch.zeros(1)})
    with pytest.raises(ConfigurationError, match="a text adapter"):
        export(str(checkpoint), tmp_path / "out.safetensors")


def toy_run(run: Path, *overrides: str) -> Path:
    """A checkpoint of the toy with random weights."""
    config = load_config("tests/tools/toy.yaml", [f"output_folder={run}", *overrides])
    weights = build_training_model(config, Device.cpu).state_dict()
    generator = torch.Generator().manual_seed(len(overrides))
    return stored(run, config, {name: torch.randn(x.shape, generator=generator) * 0.1 for name, x in weights.items()})[
        0
    ]


def test_a_phase_that_would_lose_the_text_adapter_of_its_initial_folder_says_so(tmp_path, caplog):
    export(str(toy_run(tmp_path / "run", "model.text_adapter={layers: 1}")), tmp_path / "out")
    start = f"init_from.checkpoint={tmp_path / 'out'}"
    build_training_model(load_config("tests/tools/toy.yaml", [start, "model.text_adapter={layers: 1}"]), Device.cpu)
    assert f"{tmp_path / 'out'} has another text encoder" in caplog.text
    assert "no weights of text_adapter" in caplog.text
    caplog.clear()
    build_training_model(
        load_config("tests/tools/toy.yaml", [start, f"model.pretrained={tmp_path / 'out'}"]), Device.cpu
    )
    assert not caplog.text


def test_a_card_has_the_numbers_of_its_weights_once(tmp_path):
    checkpoint = toy_run(tmp_path / "run")
    identity = load_model(checkpoint).mark.version
    for folder, of, value in (("one", identity, 0.3456), ("copy", identity, 0.3456), ("before", "0" * 16, 0.5678)):
        result = Result(name="ep0-ba1-raw", path=str(checkpoint), weights="raw", identity=of)
        result.numbers["cmmd"] = Number(value=value, protocol={"metric": "cmmd"})
        result.write(tmp_path / folder)
    export(str(checkpoint), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (card.count("0.3456"), card.count("0.5678")) == (1, 0)


@pytest.mark.parametrize("ingredient", ["text_adapter={layers: 1}", "score_conditioning={columns: [{name: a}]}"])
def test_the_mark_of_a_card_is_that_of_the_run_s_images(tmp_path, ingredient):
    checkpoint = toy_run(tmp_path / "run", f"model.{ingredient}")
    export(str(checkpoint), tmp_path / "out")
    assert load_model(checkpoint).mark.version in (tmp_path / "out" / "README.md").read_text()


def test_the_examples_of_cards_encode_prompts_as_the_run_did(tmp_path, monkeypatch):
    base, folders = toy_run(tmp_path / "run", "model.text_encoder.chunks=2"), {}
    lora = toy_run(tmp_path / "lora", "model.text_encoder.chunks=2", "model.lora={rank: 2}")
    monkeypatch.setattr("diffusion.export.create_repository", lambda repository: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repository: folders[repository])
    for name, checkpoint, repository in (("base", base, None), ("hub", base, "anna/cats"), ("lora", lora, None)):
        out = tmp_path / "exported" / name
        export(str(checkpoint), out, repository=repository, lora_only=name == "lora")
        folders["anna/cats"] = out
        example = (out / "README.md").read_text().split("```python\n")[1].split("```")[0]
        example = example.replace("FOLDER of the initial weights", str(tmp_path / "exported" / "base"))
        example = example.replace("FOLDER", str(out)).replace("guidance_scale", "num_inference_steps=1, guidance_scale")
        found: dict[str, Any] = {}
        exec(example, found)
        assert found["encode"]("a star")["prompt_embeds"].shape[1] == 48
        assert found["image"].size == (32, 32)


def test_mistakes_show_before_a_repository_is_created_and_weights_are_loaded(tmp_path, monkeypatch):
    checkpoint = toy_run(tmp_path / "run")
    for name in ("create_repository", "load_frozen_parts"):
        monkeypatch.setattr(f"diffusion.export.{name}", lambda *_: pytest.fail("too late"))
    (tmp_path / "there").mkdir()
    for error, options in ((ConfigurationError, ["there"]), (DataError, ["out", "--data", str(tmp_path / "absent")])):
        out, *data = options
        arguments = ["export.py", str(checkpoint), str(tmp_path / out), *data, "--push-to-hub", "anna/cats"]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(error):
            runpy.run_path(str(ROOT / "scripts" / "export.py"))["main"]()
