import json
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from safetensors.torch import load_file
from transformers import CLIPTokenizer

from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig, PredictionType
from diffusion.errors import ConfigurationError, DataError
from diffusion.models import LatentDiffusion, build_model
from diffusion.models.architectures import TINY, build_vae
from diffusion.models.latent_scaling import LatentScaling
from diffusion.models.pretrained import FrozenParts, fold_scaling, open_pipeline_unet, write_pipeline, write_unet
from diffusion.models.sampling import image_seeds, inference_scheduler, initial_latents
from diffusion.models.stored_weights import StoredWeights, cut_by_size, open_safetensors, write_safetensors
from diffusion.models.tokenizers import build_clip_tokenizer, clip_merges, tokenize

PROMPTS = ["a red circle", "Blue star, 42!"]


def in_memory(tensors: dict[str, torch.Tensor]) -> StoredWeights:
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    return StoredWeights(source="here", shapes=shapes, read=lambda names: {name: tensors[name] for name in names})


def build(architecture: Architecture, scaling: LatentScaling | None = None, **objective) -> LatentDiffusion:
    unet = {"block_out_channels": [16, 32], "norm_num_groups": 4, "sample_size": 8}
    config = ModelConfig(architecture=architecture, unet=unet, frozen_seed=3)
    settings = {"prediction_type": PredictionType.v_prediction, **objective}
    model = build_model(config, ObjectiveConfig(**settings), resolution=32, seed=17).eval()
    if scaling is not None:
        model.latent_scaling = scaling
    return model


def write(model: LatentDiffusion, folder: Path) -> Path:
    folder.mkdir()
    frozen = FrozenParts(
        vae=model.vae,
        text_encoder=model.text_encoder,
        tokenizer=model.tokenizer,
        latent_scaling=model.latent_scaling,
    )
    scheduler = inference_scheduler(model.noise_scheduler)
    weights = in_memory(model.unet.state_dict())
    write_pipeline(folder, unet=model.unet, weights=weights, frozen=frozen, scheduler=scheduler)
    return folder


PER_CHANNEL = LatentScaling((0.3, -1.2, 0.1, 2.0), (0.5, 1.7, 0.9, 3.0))


@pytest.mark.parametrize(
    ("architecture", "scaling", "objective"),
    [
        (Architecture.tiny, LatentScaling((0.0,), (1 / 0.18215,)), {}),
        (Architecture.tiny, PER_CHANNEL, {"zero_terminal_snr": True}),
        (Architecture.tiny, PER_CHANNEL, {"prediction_type": PredictionType.epsilon}),
        (Architecture.tiny_xl, PER_CHANNEL, {}),
    ],
    ids=["factor", "zero terminal SNR", "epsilon", "xl"],
)
def test_a_pipeline_gives_the_images_of_generate(architecture, scaling, objective, tmp_path):
    model = build(architecture, scaling, **objective)
    if scaling is not PER_CHANNEL:
        model.vae.register_to_config(scaling_factor=0.18215)
    folder = write(model, tmp_path / "folder")
    assert not [path for path in folder.rglob("*") if path.suffix in (".bin", ".pt", ".pkl", ".ckpt")]
    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    assert (pipeline.unet.config.sample_size, pipeline.vae_scale_factor) == (8, 4)
    latents = initial_latents(image_seeds(5, 2), (4, 8, 8), torch.device("cpu"))
    options = {"num_inference_steps": 4, "guidance_scale": 3.0, "latents": latents}
    for negative in (None, "a green square"):
        expected = model.generate(PROMPTS, negative, output="tensor", progress=False, **options)
        negatives = None if negative is None else [negative] * 2
        found = pipeline(PROMPTS, negative_prompt=negatives, output_type="pt", **options).images
        assert expected.std() > 0.01, "there is something to see"
        assert (found - expected).abs().max() < 1e-4
    assert (model.generate(PROMPTS, output="tensor", progress=False, **options) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("has_convolutions", [True, False])
def test_a_folded_vae_has_the_latents_of_the_unet(has_convolutions):
    torch.manual_seed(0)
    changes = {"use_quant_conv": has_convolutions, "use_post_quant_conv": has_convolutions}
    vae = build_vae(TINY, changes).eval()
    before = {name: tensor.clone() for name, tensor in vae.state_dict().items()}
    images, latents = torch.rand(2, 3, 16, 16) * 2 - 1, torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        folded = fold_scaling(vae, PER_CHANNEL)
        found, expected = folded.encode(images).latent_dist, vae.encode(images).latent_dist
        assert (found.mean - PER_CHANNEL.normalise(expected.mean)).abs().max() < 1e-5
        std = torch.tensor(PER_CHANNEL.std).view(1, -1, 1, 1)
        assert (found.std - expected.std / std).abs().max() < 1e-5
        decoded = vae.decode(PER_CHANNEL.denormalise(latents), return_dict=False)[0]
        assert (folded.decode(latents, return_dict=False)[0] - decoded).abs().max() < 1e-5
    assert LatentScaling.from_vae(folded.config) == LatentScaling((0.0,), (1.0,))
    assert all(torch.equal(before[name], tensor) for name, tensor in vae.state_dict().items())


def test_clip_s_tokenizer_is_loaded_as_it_was(tmp_path):
    tokenizer = build_clip_tokenizer(clip_merges(), 77)
    tokenizer.save_pretrained(tmp_path)
    loaded = CLIPTokenizer.from_pretrained(tmp_path)
    captions = ["", "A photograph of an astronaut, riding a horse!", "naïve café ☃ " * 40]
    assert (tokenize(loaded, captions) == tokenize(tokenizer, captions)).all()
    assert loaded.pad_token_id == 0


def test_a_unet_in_several_files_equals_that_in_one(tmp_path):
    model = build(Architecture.tiny)
    tensors = model.unet.state_dict()
    model.unet.save_config(tmp_path / "unet")
    write_unet(tmp_path / "unet", in_memory(tensors), shard_bytes=200_000)
    files = sorted((tmp_path / "unet").glob("*.safetensors"))
    assert len(files) > 3
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 200_000 for file in files)
    loaded = UNet2DConditionModel.from_pretrained(tmp_path / "unet", local_files_only=True).state_dict()
    ours = open_pipeline_unet(tmp_path, model.unet).read_all()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor) and torch.equal(ours[name], tensor), name
    assert loaded.keys() == ours.keys() == tensors.keys()


def test_weights_of_another_network_with_the_same_shapes_are_rejected(tmp_path):
    model = build(Architecture.tiny)
    write(model, tmp_path / "folder")
    other = ModelConfig(architecture=Architecture.tiny, unet={"block_out_channels": [16, 32], "norm_num_groups": 8})
    unet = build_model(other, ObjectiveConfig(), resolution=32, seed=1).unet
    with pytest.raises(ConfigurationError, match=r"unet/config\.json: norm_num_groups"):
        open_pipeline_unet(tmp_path / "folder", unet)


def test_missing_or_damaged_files_are_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"unet .*config\.json"):
        open_pipeline_unet(tmp_path)
    (tmp_path / "unet").mkdir()
    (tmp_path / "unet" / "config.json").write_text("{}")
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").write_bytes(b"\x80\x04nonsense")
    with pytest.raises(DataError, match=r"diffusion_pytorch_model\.safetensors"):
        open_pipeline_unet(tmp_path)


def test_files_of_weights_are_read_by_the_library_and_in_parts(tmp_path, monkeypatch):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).half(),
        "c": torch.randn(2, 2, 2).bfloat16(),
        "d": torch.tensor(3.0),
        "e": torch.randn(4, 6).t(),
    }
    reads = []
    stored = in_memory(tensors)

    def read(names):
        reads.append(list(names))
        return stored.read(names)

    watched = StoredWeights(source="here", shapes=stored.shapes, read=read)
    monkeypatch.setattr("diffusion.models.stored_weights.READ_BYTES", 80)
    write_safetensors(tmp_path / "w.safetensors", watched, list("abcde"), {"z": "1", "a": "ü"})
    assert reads == [["a", "b"], ["c", "d"], ["e"]]
    loaded = load_file(tmp_path / "w.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(
        torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    ours = open_safetensors([tmp_path / "w.safetensors"], tmp_path)
    assert torch.equal(ours.read(["c"])["c"], tensors["c"])
    size = json.loads((tmp_path / "w.safetensors").read_bytes()[8:].split(b"}}")[0] + b"}}")["__metadata__"]
    assert size == {"z": "1", "a": "ü"}


def test_cutting_keeps_the_order_and_lets_one_large_weight_alone():
    shapes = {name: torch.empty(size, device="meta") for name, size in {"a": 1, "b": 10, "c": 1, "d": 1}.items()}
    assert list(cut_by_size(shapes, "abcd", 12)) == [["a"], ["b"], ["c", "d"]]


def test_weights_over_others_and_below_a_prefix():
    base = in_memory({"m.x": torch.zeros(2), "m.y": torch.zeros(3), "n.x": torch.zeros(1)}).below("m.")
    both = in_memory({"x": torch.ones(2)}).over(base)
    assert {name: tensor.tolist() for name, tensor in both.read_all().items()} == {"x": [1, 1], "y": [0, 0, 0]}
    assert {name: tuple(shape.shape) for name, shape in both.shapes.items()} == {"x": (2,), "y": (3,)}
