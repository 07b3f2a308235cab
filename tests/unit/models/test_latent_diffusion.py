import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from diffusion.composer_models import LatentDiffusionTraining
from diffusion.config.data import ImageSize
from diffusion.config.model import Architecture, ModelConfig, ObjectiveConfig, Posterior, PredictionType
from diffusion.datasets.batch import BatchKey
from diffusion.errors import ConfigurationError
from diffusion.models import LatentDiffusion, load_frozen_parts, tiny
from diffusion.models.build import build_parts
from diffusion.models.conditioning import Conditioning
from diffusion.models.latents import LatentScaling
from diffusion.models.sampling import expand_prompts, inference_scheduler, initial_latents, sample_latents
from diffusion.preparation.encoding.models import Encoder, EncodingModels

SMALL = {"block_out_channels": [16, 32], "norm_num_groups": 4}


def small_model(**objective) -> LatentDiffusionTraining:
    settings = {"prediction_type": PredictionType.v_prediction, **objective}
    config = ModelConfig(architecture=Architecture.tiny, network=SMALL)
    return LatentDiffusionTraining(**build_parts(config, ObjectiveConfig(**settings), resolution=32, seed=17))


def image_batch(num: int = 6, step: int = 0) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        BatchKey.IMAGE: torch.randint(0, 256, (num, 3, 32, 32), generator=generator, dtype=torch.uint8),
        BatchKey.TOKEN_IDS: torch.randint(1, 2000, (num, 24), generator=generator),
        BatchKey.SAMPLE: torch.arange(num) + 1000,
        BatchKey.STEP: torch.full((num,), step),
    }


def latent_batch(model: LatentDiffusion, images: dict) -> dict:
    posterior = model.vae.encode(images[BatchKey.IMAGE].float() / 127.5 - 1).latent_dist
    rest = {key: value for key, value in images.items() if key != BatchKey.IMAGE}
    return rest | {
        BatchKey.LATENT_MEAN: posterior.mean.detach().half(),
        BatchKey.LATENT_LOGVAR: posterior.logvar.detach().half(),
    }


@pytest.fixture(scope="module")
def model() -> LatentDiffusionTraining:
    return small_model()


def test_only_the_unet_is_in_parameters_and_state_dict(model):
    assert {name.split(".")[0] for name in model.state_dict()} == {"unet"}
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"unet"}


def test_frozen_parts_stay_in_eval_mode_without_gradients():
    model = small_model().train()
    model.loss(model(image_batch()), image_batch()).backward()
    for part in (model.vae, model.text_encoder):
        assert not part.training
        assert all(p.grad is None and not p.requires_grad for p in part.parameters())
    assert all(p.grad is not None for p in model.unet.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_stored_text_embeddings_take_the_place_of_the_text_encoder(dropout):
    model = small_model(caption_dropout=dropout)
    batch = image_batch(8)
    expected = model(batch).prediction
    text = model.conditioner.encode_text(batch[BatchKey.TOKEN_IDS])
    stored = {
        **batch,
        BatchKey.TEXT_EMBEDDING: text.hidden.half(),
        BatchKey.POOLED_TEXT_EMBEDDING: text.pooled.half(),
    }
    torch.testing.assert_close(model(stored).prediction, expected, rtol=1e-2, atol=1e-3)
    other = {**stored, BatchKey.TEXT_EMBEDDING: torch.zeros_like(stored[BatchKey.TEXT_EMBEDDING])}
    changed = (model(other).prediction - expected).abs().amax(dim=(1, 2, 3)) > 1e-2
    assert changed.any(), "the embeddings are used"
    assert bool(changed.all()) == (dropout == 0.0), "a dropped caption's is that of the empty caption"


def test_frozen_parts_move_with_the_model():
    model = small_model()
    model.to(torch.bfloat16)
    assert model.vae.dtype == model.text_encoder.dtype == model.unet.dtype == torch.bfloat16
    model.to("meta")
    assert next(model.vae.parameters()).device.type == "meta"
    assert copy.deepcopy(small_model()).vae is not model.vae


def test_a_sample_has_the_same_loss_in_any_microbatch(model):
    batch = image_batch()
    prediction = model(batch)
    whole = (prediction.prediction - prediction.target).square().mean(dim=(1, 2, 3))
    for i in range(6):
        one = {key: value[i : i + 1] for key, value in batch.items()}
        assert model.loss(model(one), one).item() == pytest.approx(whole[i].item(), rel=1e-5)
        torch.testing.assert_close(model(one).target, prediction.target[i : i + 1], rtol=1e-4, atol=1e-5)
        assert torch.equal(model(one).draws.timesteps, prediction.draws.timesteps[i : i + 1])
    assert model.loss(prediction, batch).item() == pytest.approx(whole.mean().item(), rel=1e-6)


def test_noise_changes_with_the_step_and_repeats_for_the_same_one(model):
    first, again, later = model(image_batch()), model(image_batch()), model(image_batch(step=1))
    assert torch.equal(first.target, again.target)
    assert torch.equal(first.draws.timesteps, again.draws.timesteps)
    assert not torch.equal(first.draws.timesteps, later.draws.timesteps)
    assert not torch.equal(first.target, later.target)


def test_training_without_steps_is_warned_about(model, recwarn):
    batch = image_batch()
    model.train()(batch)
    del batch[BatchKey.STEP]
    model.eval_forward(batch)
    with torch.no_grad():
        model(batch)
    assert not any("'step'" in str(warning.message) for warning in recwarn)
    with pytest.warns(UserWarning, match=r"batch\['step'\]"):
        model(batch)


def test_evaluation_is_fixed_whatever_the_step_and_drops_no_caption():
    model = small_model(caption_dropout=1.0)
    first, later = model.eval_forward(image_batch()), model.eval_forward(image_batch(step=7))
    assert torch.equal(first.prediction, later.prediction)
    other_captions = image_batch()
    other_captions[BatchKey.TOKEN_IDS] = other_captions[BatchKey.TOKEN_IDS].flip(0)
    assert not torch.equal(model.eval_forward(other_captions).prediction, first.prediction)
    assert torch.equal(model(other_captions).prediction, model(image_batch()).prediction)


def test_dropped_captions_become_the_empty_one():
    model = small_model(caption_dropout=0.5)
    batch = image_batch(200)
    empty = torch.from_numpy(model.tokenizer("", padding="max_length", return_tensors="np")["input_ids"]).long()
    ids = model(batch).draws.token_ids
    dropped = (ids == empty).all(dim=1)
    assert 70 < dropped.sum() < 130
    assert torch.equal(ids[~dropped], batch[BatchKey.TOKEN_IDS][~dropped])


@pytest.mark.parametrize("posterior", list(Posterior))
def test_images_and_latents_give_the_same_loss(posterior):
    model = small_model(posterior=posterior)
    images = image_batch()
    from_images = model.loss(model(images), images).item()
    latents = latent_batch(model, images)
    assert model.loss(model(latents), latents).item() == pytest.approx(from_images, rel=1e-3)


def test_sampling_the_posterior_needs_its_variance():
    model = small_model()
    latents = latent_batch(model, image_batch())
    del latents[BatchKey.LATENT_LOGVAR]
    with pytest.raises(ValueError, match="mean-only"):
        model(latents)


def test_min_snr_weights_enter_the_loss_but_not_the_metric():
    plain, weighted = small_model(), small_model(min_snr_gamma=5.0)
    batch = image_batch()
    outputs = weighted(batch)
    error = (outputs.prediction - outputs.target).square().mean(dim=(1, 2, 3))
    assert weighted.loss(outputs, batch).item() == pytest.approx((error * outputs.weight).mean().item(), rel=1e-6)
    metric = weighted.get_metrics()["loss"]
    weighted.update_metric(batch, outputs, metric)
    assert metric.compute().item() == pytest.approx(error.mean().item(), rel=1e-6)
    assert plain.loss(plain(batch), batch) != weighted.loss(outputs, batch)


def test_validation_losses_by_stream_exclude_copies(model):
    batch = image_batch() | {
        BatchKey.STREAM: torch.tensor([0, 0, 2, 2, 2, 2]),
        BatchKey.IS_COUNTED: torch.tensor([True, True, True, True, True, False]),
    }
    error = (model(batch).prediction - model(batch).target).square().mean(dim=(1, 2, 3)).detach()
    assert set(model.get_metrics()) == {"loss"}
    model.validation_streams = ["256-512", "", "512-up"]
    metrics = model.get_metrics()
    model.validation_streams = ()
    assert set(metrics) == {"loss", "loss/256-512", "loss/512-up"}
    for metric in metrics.values():
        model.update_metric(batch, model(batch), metric)
    found = {name: metric.compute().item() for name, metric in metrics.items()}
    expected = {"loss": error[:5], "loss/256-512": error[:2], "loss/512-up": error[2:5]}
    assert found == pytest.approx({name: part.mean().item() for name, part in expected.items()}, rel=1e-5)


def test_the_loss_is_the_mean_of_the_errors_of_samples():
    model = small_model(min_snr_gamma=5.0)
    outputs = model(image_batch())
    assert torch.equal(model.sample_errors(outputs).mean(), model.loss(outputs, image_batch()))


def test_latent_scaling_by_scalar_or_channel_inverts():
    latents = torch.randn(2, 4, 3, 3)
    for scaling in (LatentScaling((0.0,), (1 / 0.18215,)), LatentScaling((0.1, 0.2, 0.3, 0.4), (1.0, 2.0, 3.0, 4.0))):
        torch.testing.assert_close(scaling.denormalise(scaling.normalise(latents)), latents)
    torch.testing.assert_close(LatentScaling((0.0,), (1 / 0.18215,)).normalise(latents), latents * 0.18215)
    per_channel = LatentScaling((0.0, 0.0, 0.0, 4.0), (1.0, 1.0, 1.0, 2.0)).normalise(latents)
    torch.testing.assert_close(per_channel[:, 3], (latents[:, 3] - 4) / 2)


@pytest.mark.parametrize("low_precision_norms", [True, False])
def test_autocast_on_the_cpu_reaches_the_norms(low_precision_norms, monkeypatch):
    config = ModelConfig(architecture=Architecture.tiny, network=SMALL, low_precision_norms=low_precision_norms)
    model, batch = (
        LatentDiffusionTraining(**build_parts(config, ObjectiveConfig(), resolution=32, seed=17)),
        image_batch(),
    )
    norms = [module for module in model.unet.modules() if isinstance(module, torch.nn.GroupNorm | torch.nn.LayerNorm)]
    full = model.loss(model(batch), batch).item()
    called, weights = [], []
    for norm in norms:
        norm.register_forward_pre_hook(lambda module, inputs: called.append(module))
    for name in ("group_norm", "layer_norm"):
        compute = getattr(F, name)

        def watched(x, sizes, weight, *rest, compute=compute):
            if called:
                called.pop()
                weights.append(weight.dtype)
            return compute(x, sizes, weight, *rest)

        monkeypatch.setattr(F, name, watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(batch)
    assert len(weights) == len(norms) > 10
    assert set(weights) == {torch.bfloat16 if low_precision_norms else torch.float32}
    assert outputs.prediction.dtype == torch.bfloat16
    assert model.loss(outputs, batch).item() == pytest.approx(full, rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_latents_in_the_precision_of_the_run_equal_those_from_images(precision):
    model, images = small_model(), image_batch()
    rest = {key: value for key, value in images.items() if key != BatchKey.IMAGE}
    encoder = Encoder(
        EncodingModels.of(load_frozen_parts(ModelConfig(architecture=Architecture.tiny))), "cpu", precision
    )
    encoded = encoder.start({ImageSize(32, 32): images[BatchKey.IMAGE]}, [])
    [(mean, logvar)] = encoded.moments.values()
    latents = rest | {BatchKey.LATENT_MEAN: mean, BatchKey.LATENT_LOGVAR: logvar}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        is_same = torch.equal(model(latents).target, model(images).target)
        assert torch.equal(model(latents).prediction, model(images).prediction) == is_same
    assert is_same == (precision == "bf16")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_loss_of_a_model_stored_in_half_precision(dtype):
    full, half, batch = small_model(), small_model().to(dtype), image_batch()
    expected = full.loss(full(batch), batch).item()
    outputs = half(batch)
    assert outputs.prediction.dtype == dtype
    assert half.loss(outputs, batch).item() == pytest.approx(expected, rel=0.02)
    assert half.loss(half.eval_forward(batch), batch).item() == pytest.approx(
        full.loss(full.eval_forward(batch), batch).item(), rel=0.02
    )


@pytest.mark.parametrize("force_upcast", [True, False])
def test_a_vae_that_overflows_in_float16_computes_in_float32_under_autocast_too(force_upcast):
    model = small_model()
    model.vae.register_to_config(force_upcast=force_upcast)
    with torch.no_grad():
        model.vae.encoder.conv_in.weight.mul_(1e6)
        model.vae.decoder.conv_in.weight.mul_(1e6)
        with torch.autocast("cpu", torch.float16):
            found = [model(image_batch()).target, model.decode(torch.ones(1, 4, 8, 8))]
    assert [bool(torch.isfinite(tensor).all()) for tensor in found] == [force_upcast] * 2


@pytest.mark.parametrize("force_upcast", [True, False])
def test_a_vae_that_overflows_in_float16_computes_in_float32(force_upcast):
    model = small_model().half()
    model.vae.register_to_config(force_upcast=force_upcast)
    found = []
    for convolution in (model.vae.encoder.conv_out, model.vae.decoder.conv_out):
        convolution.register_forward_hook(lambda module, inputs, output: found.append(output.dtype))
    model(image_batch())
    model.generate("a", num_inference_steps=1, progress=False)
    assert set(found) == {torch.float32 if force_upcast else torch.float16}
    assert model.vae.dtype == torch.float16


def test_weights_come_from_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = small_model()
    assert torch.equal(torch.rand(1), expected)
    second = small_model()
    for one, other in ((first.unet, second.unet), (first.vae, second.vae), (first.text_encoder, second.text_encoder)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_loads_frozen_parts_from_a_diffusers_folder(tmp_path):
    source = load_frozen_parts(ModelConfig(architecture=Architecture.tiny, frozen_seed=5))
    source.vae.save_pretrained(tmp_path / "vae")
    source.text_encoder.save_pretrained(tmp_path / "text_encoder")
    loaded = tiny(str(tmp_path))
    for one, other in ((source.vae, loaded.vae), (source.text_encoder, loaded.text_encoder)):
        assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
        assert not other.training


@pytest.mark.parametrize(
    ("key", "source", "message"),
    [
        ("pretrained", "./nowhere", "model.pretrained: .*./nowhere"),
        ("pretrained", "someone/something", "someone/something"),
        ("vae", "runs/none/vae", "model.vae: .*runs/none/vae"),
    ],
)
def test_missing_weights_are_a_clear_error(key, source, message):
    with pytest.raises(ConfigurationError, match=message):
        load_frozen_parts(ModelConfig(architecture=Architecture.tiny, **{key: source}))


class TestGenerate:
    def test_gives_images_of_the_trained_size(self, model):
        images = model.generate(["a red circle", "b"], num_inference_steps=2, progress=False)
        assert [image.size for image in images] == [(32, 32), (32, 32)]
        assert all(isinstance(image, Image.Image) for image in images)

    def test_an_image_depends_on_its_seed_alone(self, model):
        options = {"num_inference_steps": 2, "output": "tensor", "progress": False}
        both = model.generate(["a", "a"], seed=0, **options)
        assert not torch.equal(both[0], both[1])
        second = model.generate("a", seed=[1], **options)
        torch.testing.assert_close(second[0], both[1], rtol=0, atol=1e-5)
        one_by_one = model.generate(["a", "a"], seed=0, batch_size=1, **options)
        torch.testing.assert_close(one_by_one, both, rtol=0, atol=1e-5)
        assert not torch.equal(model.generate("a", **options), model.generate("a", **options))

    def test_guidance_leads_away_from_the_negative_prompt(self, model):
        options = {"num_inference_steps": 2, "seed": 3, "output": "tensor", "progress": False}
        assert torch.equal(model.generate("a", **options), model.generate("a", "", **options))
        assert not torch.equal(model.generate("a", **options), model.generate("a", "red", **options))
        unguided = model.generate("a", guidance_scale=1.0, **options)
        torch.testing.assert_close(model.generate("a", "a", guidance_scale=7.0, **options), unguided, rtol=0, atol=1e-4)

    def test_other_sizes_and_several_images_per_prompt(self, model):
        images = model.generate(
            ["a", "b"],
            height=40,
            width=64,
            num_images_per_prompt=2,
            num_inference_steps=1,
            output="tensor",
            progress=False,
        )
        assert images.shape == (4, 3, 40, 64)
        assert 0 <= images.min() <= images.max() <= 1

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_in_any_stored_precision(self, dtype):
        full = small_model().generate("a", seed=0, num_inference_steps=2, output="tensor", progress=False)
        half = small_model().to(dtype).generate("a", seed=0, num_inference_steps=2, output="tensor", progress=False)
        assert (half - full).abs().mean() < 0.05

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"height": 30}, "30"),
            ({"seed": [1, 2]}, "seeds"),
            ({"seed": -1}, "seed -1"),
            ({"negative_prompts": ["a", "b"]}, "negative prompts"),
            ({"output": "jpeg"}, "output 'jpeg'"),
            ({"num_images_per_prompt": 0}, "num_images_per_prompt 0"),
            ({"batch_size": 0}, "batch_size 0"),
            ({"num_inference_steps": 0}, "num_inference_steps 0"),
            ({"num_inference_steps": 1001}, "num_inference_steps 1001"),
            ({"num_inference_steps": 1.5}, "num_inference_steps 1.5"),
            ({"height": 0}, "height 0"),
            ({"width": 32.0}, "width 32.0"),
            ({"seed": [1.5]}, "seed 1.5"),
            ({"seed": 2**32}, f"seed {2**32}"),
            ({"negative_prompts": [1]}, "negative_prompts 1"),
            ({"guidance_scale": "3"}, "guidance_scale '3'"),
            ({"guidance_scale": [1, 2]}, "guidance_scale"),
            ({"guidance_scale": float("nan")}, "guidance_scale nan"),
            ({"original_size": 64}, "original_size 64"),
            ({"crop": (1, 2, 3)}, "crop"),
            ({"latents": torch.zeros(2, 4, 8, 8)}, r"latents \(2, 4, 8, 8\): .* \(1, 4, 8, 8\)"),
            ({"latents": torch.zeros(1, 4, 8, 8), "height": 64}, r"\(1, 4, 16, 8\)"),
        ],
    )
    def test_wrong_arguments_are_named(self, model, options, message):
        with pytest.raises(ValueError, match=message):
            model.generate("a", **{"num_inference_steps": 1, "progress": False, **options})

    @pytest.mark.parametrize("prompts", [None, b"a", ["a", None]])
    def test_what_is_no_text_is_refused(self, model, prompts):
        with pytest.raises(ValueError, match="prompts"):
            model.generate(prompts)

    def test_prompts_of_an_iterator_and_absent_negative_ones(self, model):
        assert expand_prompts((text for text in "ab"), [None, "x"], 1) == (["a", "b"], ["", "x"])  # pyright: ignore
        assert np.array_equal(model.tokenize("a cat"), model.tokenize(["a cat"]))

    def test_no_prompts_are_no_images(self, model):
        assert model.generate([], seed=0) == []
        assert model.generate([], height=64, output="tensor").shape == (0, 3, 64, 32)

    @pytest.mark.parametrize(
        "seed", [np.int64(3), np.array([3, 4]), torch.tensor(3), torch.tensor([3, 4]), range(3, 5)]
    )
    def test_seeds_may_be_any_library_s_whole_numbers(self, model, seed):
        options = {"num_inference_steps": 1, "output": "tensor", "progress": False}
        assert torch.equal(
            model.generate(["a", "b"], seed=seed, **options), model.generate(["a", "b"], seed=3, **options)
        )

    @pytest.mark.parametrize("zero_terminal_snr", [False, True])
    def test_all_steps_of_the_schedule_may_be_taken(self, zero_terminal_snr):
        process = small_model(zero_terminal_snr=zero_terminal_snr).noise_scheduler
        seen = []

        def denoise(x, timestep, conditioning):
            seen.append(timestep.item())
            return torch.zeros_like(x)

        conditioning = Conditioning(torch.zeros(1, 1, 1))
        sampled = sample_latents(
            denoise, inference_scheduler(process), torch.ones(1, 4, 2, 2), conditioning, conditioning,
            num_inference_steps=1000, guidance_scale=1.0,
        )  # fmt: skip
        assert seen == list(range(999, -1, -1))
        assert sampled.isfinite().all()

    def test_initial_noise_is_drawn_on_the_cpu_for_any_device(self, monkeypatch):
        drawn_on = []

        def normal(seed, purpose, step, sample, shape):
            drawn_on.append(sample.device.type)
            return torch.zeros(1, *shape)

        monkeypatch.setattr("diffusion.models.sampling.normal", normal)
        assert initial_latents([1, 2], (4, 8, 8), torch.device("meta")).device.type == "meta"
        assert drawn_on == ["cpu", "cpu"]

    def test_leaves_the_mode_of_the_unet_as_it_was(self, model):
        model.unet.train()
        model.generate("a", num_inference_steps=1, progress=False)
        assert model.unet.training

    def test_grid_shows_the_images_in_rows(self):
        from diffusion.models.sampling import image_grid

        images = [Image.new("RGB", (4, 4), (40 * i, 0, 0)) for i in range(5)]
        grid = np.asarray(image_grid(images, 2))
        assert grid.shape == (3 * 6 + 2, 2 * 6 + 2, 3)
        assert grid[2, 8].tolist() == [40, 0, 0]
        assert grid[14, 2].tolist() == [160, 0, 0]
