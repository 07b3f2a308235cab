from contextlib import nullcontext

import pytest

from diffusion.config.checks import check, check_device
from diffusion.config.data import (
    DataConfig,
    ImageSize,
    Mixing,
    StreamConfig,
    ValidationConfig,
    group_size,
    image_sizes,
    legal_world_sizes,
    microbatch_size,
)
from diffusion.config.loading import dump, load, to_dict
from diffusion.config.locations import is_location, missing_locations
from diffusion.config.model import ModelConfig
from diffusion.config.schema import Config
from diffusion.config.training import Device, TrainerConfig
from diffusion.errors import ConfigurationError, MachineError

GROUPS = ["data.mixing=groups", "data.group_size=16"]
SCORES = ["model.score_conditioning={columns: [{name: aesthetic, mean: 5}]}"]
TWO_SIZES = ["data.streams=[{name: 256x256}, {name: 192x320}]"]


@pytest.fixture
def configuration(tmp_path):
    config = Config(
        run_name="r",
        model=ModelConfig(pretrained="/weights"),
        data=DataConfig(
            local="/data",
            streams=[StreamConfig(name="a"), StreamConfig(name="b")],
            resolution=256,
            global_batch_size=2048,
        ),
        validation=ValidationConfig(local="/validation"),
        trainer=TrainerConfig(max_duration="550000ba"),
    )
    path = tmp_path / "run.yaml"
    path.write_text(dump(to_dict(config)), encoding="utf-8")
    return lambda *overrides: load(Config, path, overrides)


@pytest.mark.parametrize("world_size", [1, 2, 8, 64, 128])
def test_the_recipe_passes(configuration, world_size):
    overrides = ["trainer.device_train_microbatch_size=16", "algorithms.ema.start=500000ba"]
    check(configuration(*overrides), world_size=world_size, side_factor=8)


@pytest.mark.parametrize(
    "overrides",
    [
        *([f"run_name={name}"] for name in ["a", "a/b", "/a", "a/../b", "..a"]),
        ["performance.cuda_graphs=true", "trainer.parallelism=ddp", "trainer.device_train_microbatch_size=16"],
        ["data.streams=[{name: a, remote: 's3://b/a', endpoint_url: 'https://objects.example.com', profile: mine}]"],
        ["data.remote=s3://bucket", "data.streams.0.endpoint_url=https://objects.example.com"],
        ["data.streams=[{name: 896x1152}, {name: 1024x1024, resolution: [1024, 1024]}]", "data.mixing=bucket"],
        [*TWO_SIZES, *GROUPS],
        ["data.streams=[{name: a, resolution: [896, 1152]}]"],
        ["algorithms.ema={start: 1ba, decays: [], power: {snapshot_interval: 5ba}}"],
        ["data.cache_limit=500gb", "data.remote=s3://b"],
        ["model={pretrained: null, vae: /vae, text_encoder: {path: /t5}}"],
        ["model={pretrained: null, architecture: tiny_xl}"],
        ["plugins.callbacks=[{path: a.B, arguments: {limit: .inf}}]"],
        ["trainer.dist_timeout=300", "data.num_workers=0"],
        [
            *("data.text_embeddings=true", "data.representation=latents"),
            "model={text_adapter: {layers: 1}, text_encoder: {path: /t5}}",
        ],
    ],
)
def test_legal_combinations(configuration, overrides):
    check(configuration(*overrides), world_size=128, side_factor=8)


@pytest.mark.parametrize(
    ("overrides", "world_size", "keys"),
    [
        (["model.pretrained=null"], 8, ["the VAE and the text encoder would have random weights"]),
        (["model={pretrained: null, architecture: transformer_m, vae: /vae}"], 8, ["the text encoder would"]),
        (["model={pretrained: null, text_encoder: {path: /t5}}"], 8, ["and the VAE would"]),
        ([], 12, ["data.global_batch_size is 2048", "8 or 16 ranks (legal are 1, 2, 4, 8", "2040 or 2052"]),
        (["data.global_batch_size=96", *GROUPS], 5, ["data.global_batch_size is 96", "legal are 1, 2, 3, 6)"]),
        (["data.global_batch_size=256", *GROUPS], 32, ["data.global_batch_size", "1, 2, 4, 8, 16)"]),
        (["model.token_routing={}"], 1, ["model.token_routing is set with model.architecture stable_diffusion_2"]),
        (
            ["model.network={dropout: 0.1, num_class_embeds: 10}"],
            1,
            ["model.network.dropout is 0.1", "model.network.num_class_embeds is 10"],
        ),
        (
            ["model={alignment: {path: /dino}, network: {mid_block_type: null}}"],
            1,
            ["model.network.mid_block_type is null"],
        ),
        (
            [
                *("model.architecture=transformer_m", "model.token_routing={}"),
                *("trainer.activation_checkpointing=true", "performance.compilation=unet"),
            ],
            1,
            ["model.token_routing", "Set performance.compilation=blocks"],
        ),
        (["trainer.num_replicas=3"], 4, ["trainer.num_replicas is 3"]),
        (["performance.cuda_graphs=true"], 128, ["performance.cuda_graphs", "trainer.parallelism=ddp"]),
        (
            [
                "performance={cuda_graphs: true, compilation: none}",
                "trainer.parallelism=ddp",
                "trainer.activation_checkpointing=true",
                "trainer.device_train_microbatch_size=16",
                "data.mixing=bucket",
                *TWO_SIZES,
            ],
            64,
            [
                "performance.compilation",
                "trainer.activation_checkpointing",
                "trainer.device_train_microbatch_size",
                "data.streams",
            ],
        ),
        (["data.resolution=260"], 1, ["data.resolution is 260", "256 or 264"]),
        (["data.streams=[{name: 900x1152}]"], 1, ["data.streams.0.resolution is 900 x 1152"]),
        (["validation.streams=[{name: a, resolution: [900, 1152]}]"], 1, ["validation.streams.0.resolution"]),
        (["data.streams.0.resolution=[896]"], 1, ["data.streams.0.resolution is [896]"]),
        (["data.streams.0.resolution=[0, 8]"], 1, ["data.streams.0.resolution.0 is 0"]),
        (
            ["data.streams=[{name: 896x1152, resolution: [1152, 896]}]"],
            1,
            ["data.streams.0.resolution is [1152, 896]", "896 x 1152"],
        ),
        (TWO_SIZES, 1, ["192 x 320, 256 x 256", "data.mixing=bucket", "data.mixing=groups", "data.group_size"]),
        (["data.mixing=groups"], 1, ["data.group_size is None"]),
        (["data.mixing=bucket", "data.group_size=8"], 1, ["data.group_size is 8", "data.mixing is bucket"]),
        ([*GROUPS, "data.group_size=24"], 1, ["data.group_size is 24", "data.global_batch_size 2048"]),
        ([*GROUPS, "data.group_size=0"], 1, ["data.group_size is 0, but must be at least 1."]),
        *(([f"trainer.max_duration='{text}'"], 1, [f"trainer.max_duration is '{text}'"]) for text in ["3ep", "0ba"]),
        *(([f"run_name='{name}'"], 1, ["run_name"]) for name in [" ", "//", "a/../../b"]),
        *(([f"{key}=''"], 1, [f"{key} is empty"]) for key in ["output_folder", "data.remote", "data.streams.1.name"]),
        (["output_folder=s3://b/x"], 1, ["output_folder is 's3://b/x'", "trainer.checkpoint_folder"]),
        (["trainer.checkpoint_folder=gs://b/x"], 1, ["trainer.checkpoint_folder is 'gs://b/x'"]),
        (["data.local=s3://bucket/x"], 1, ["data.local is 's3://bucket/x'", "Set data.remote to"]),
        (["validation.local=gs://b/x"], 1, ["validation.local is 'gs://b/x'", "validation.remote"]),
        (["data.streams.0.local=s3://b/x"], 1, ["data.streams.0.local is 's3://b/x'", "data.streams.0.remote"]),
        (["validation.streams=[{name: a, local: s3://b/x}]"], 1, ["validation.streams.0.local is 's3://b/x'"]),
        (["trainer.eval_interval=often"], 1, ["trainer.eval_interval is 'often'"]),
        (["trainer.keep_every=1ep"], 1, ["trainer.keep_every is '1ep'"]),
        (["trainer.max_duration=1000ba"], 1, ["schedule.warmup is '10000ba'", "trainer.max_duration is '1000ba'"]),
        (["schedule.warmup=8sp"], 1, ["schedule.warmup is '8sp'"]),
        (["samples.interval=' 1ba'"], 1, ["samples.interval is ' 1ba'"]),
        (["algorithms.ema.start=550000ba"], 1, ["algorithms.ema.start is '550000ba'", "algorithms.ema=null"]),
        (["algorithms.ema.start=1dur"], 1, ["algorithms.ema.start is '1dur'"]),
        (["algorithms.ema={start: 1ba, decays: [0.9, 1]}"], 1, ["algorithms.ema.decays.1 is 1.0"]),
        (["algorithms.ema={start: 1ba, decays: []}"], 1, ["algorithms.ema.decays is empty"]),
        (["algorithms.ema={start: 1ba, decays: [0.9, 0.9]}"], 1, ["algorithms.ema.decays is [0.9, 0.9]"]),
        (
            ["algorithms.ema={start: 1ba, power: {relative_widths: [0.1, 0.3], snapshot_interval: 5ep}}"],
            1,
            [
                "algorithms.ema.power.relative_widths.1 is 0.3",
                "0.288",
                "algorithms.ema.power.snapshot_interval is '5ep'",
            ],
        ),
        (
            ["algorithms.ema={start: 1ba, power: {relative_widths: [0.1, 0.1], snapshot_interval: 5ba}}"],
            1,
            ["algorithms.ema.power.relative_widths is [0.1, 0.1]"],
        ),
        (["algorithms.ema={start: 1ba, interval: 8sp}"], 1, ["algorithms.ema.interval is '8sp'"]),
        (["autoencoder.adversarial_start=1ep"], 1, ["autoencoder.adversarial_start is '1ep'"]),
        (
            [
                "task=autoencoder",
                "autoencoder={adversarial_weight: 1, equivariance: {min_scale: 0.05}}",
                "data.crop=centre",
            ],
            1,
            ["autoencoder.equivariance.min_scale is 0.05", "256 pixels", "Set it to 0.1,"],
        ),
        (["samples.num_inference_steps=1001"], 1, ["samples.num_inference_steps is 1001"]),
        (["autoencoder.initial_logvar=.nan"], 1, ["autoencoder.initial_logvar is nan", "-30", "20"]),
        (["operations.guard.skip_steps=[3, -1]"], 1, ["operations.guard.skip_steps.1 is -1"]),
        (["operations.heartbeat_folder=s3://bucket/h"], 1, ["operations.heartbeat_folder is 's3://bucket/h'"]),
        (
            ["output_folder=runs/a", "trainer.checkpoint_folder=./runs/a/"],
            1,
            ["trainer.checkpoint_folder is './runs/a/'"],
        ),
        (["operations.max_dollars=3"], 1, ["operations.max_dollars", "plan.price_per_gpu_hour"]),
        (["data.validate_hash=shake_128"], 1, ["data.validate_hash is 'shake_128'"]),
        (
            ["plugins.train_dataset={path: a.B}", "data.streams=???"],
            1,
            ["validation.streams is null", "plugins.train_dataset"],
        ),
        (
            ["data.cache_limit=500gb", "data.streams.0.remote=s3://b/a"],
            1,
            ["data.cache_limit is '500gb', but stream 'b' has no remote"],
        ),
        (["data.cache_limit=lots", "data.remote=s3://b"], 1, ["data.cache_limit is 'lots'"]),
        (
            ["data.representation=latents", "data.crop=random", "data.horizontal_flip=0.5"],
            1,
            ["data.crop is random", "data.horizontal_flip is 0.5"],
        ),
        (["data.text_embeddings=true"], 1, ["data.text_embeddings is true", "data.representation=latents"]),
        (
            ["data.text_embeddings=true", "data.representation=latents", "model.text_adapter={layers: 1}"],
            1,
            ["data.text_embeddings is true with model.text_adapter"],
        ),
        (
            ["model.architecture=transformer_s", "performance.attention=flash"],
            1,
            ["performance.attention is flash"],
        ),
        (
            ["data.representation=latents", "task=autoencoder"],
            1,
            ["data.representation=images", "trainer.parallelism=ddp"],
        ),
        (
            ["task=autoencoder", "trainer.parallelism=ddp", "init_from.checkpoint=runs/vae", "model.lora={rank: 4}"],
            1,
            ["task is autoencoder", "Set model.lora=null"],
        ),
        (
            [
                "task=autoencoder",
                "trainer={parallelism: ddp, activation_checkpointing: true}",
                "samples.prompts=[a cat]",
                "model.score_conditioning={columns: [{name: aesthetic, mean: 5, std: 1}]}",
            ],
            1,
            ["trainer.activation_checkpointing=false", "samples.prompts=[]", "model.score_conditioning=null"],
        ),
        (
            ["task=autoencoder", "data.resolution=16", "autoencoder={adversarial_weight: 1, perceptual_weight: 1}"],
            1,
            ["autoencoder.adversarial_weight is 1.0, which needs images of 24 pixels, not 16"],
        ),
        (
            ["run_name=a{b}", "output_folder=runs/{run_name}", "trainer.checkpoint_folder=s3://b/{rank}"],
            1,
            ["run_name is 'a{b}'", "output_folder is 'runs/{run_name}'", "checkpoint_folder is 's3://b/{rank}'"],
        ),
        (["seed=4294967295", "samples.seed=4294967295"], 1, ["seed is 4294967295", "samples.seed is 4294967295"]),
        (
            ["task=autoencoder", "trainer.parallelism=ddp", "plugins.train_dataset={path: a.B}", "data.streams='???'"],
            1,
            ["measured on data.streams"],
        ),
        (["model.lora={rank: 4}"], 1, ["model.lora", "init_from.checkpoint"]),
        (["model.lora={rank: 0, alpha: 0.0}"], 1, ["model.lora.rank is 0", "model.lora.alpha is 0.0"]),
        (["model.text_encoder={path: folder, chunks: 2}"], 1, ["model.text_encoder.chunks is 2"]),
        (["model.text_adapter.width=64"], 1, ["model.text_adapter.width is 64"]),
        (["model={architecture: tiny_xl, text_encoder: {chunks: 2}}"], 1, ["model.text_encoder is set"]),
        (["samples.scores={aesthetic: 7.0}"], 1, ["samples.scores has aesthetic"]),
        (["model.score_conditioning={columns: []}"], 1, ["model.score_conditioning.columns is []"]),
        (
            ["model.alignment={path: dinov2}", "data.representation=latents"],
            1,
            ["model.alignment is set with data.representation latents"],
        ),
        (
            ["model.alignment={path: dinov2}", "model.lora={rank: 4}", "init_from.checkpoint=runs/a"],
            1,
            ["model.alignment trains a new projection"],
        ),
        (
            ["model.architecture=stable_diffusion_xl", "model.text_adapter={layers: 1}"],
            1,
            ["model.text_adapter continues one text encoder"],
        ),
        (
            ["objective.zero_terminal_snr=true"],
            1,
            ["objective.zero_terminal_snr", "objective.prediction_type=v_prediction"],
        ),
        (
            ["trainer={parallelism: ddp, reshard_after_forward: true, num_replicas: 2, reduce_precision: bf16}"],
            2,
            ["trainer.reshard_after_forward is true", "trainer.num_replicas is 2", "trainer.reduce_precision is bf16"],
        ),
        (["trainer.reduce_precision=fp16"], 1, ["trainer.reduce_precision is fp16", "trainer.precision amp_bf16"]),
        (["samples.scores={a: .nan}"], 1, ["samples.scores.a is nan"]),
        (["objective.flow.logit_mean=.inf"], 1, ["objective.flow.logit_mean is inf, but must be finite"]),
        (["trainer.dist_timeout=.inf"], 1, ["trainer.dist_timeout is inf, but must be finite"]),
        (["operations.supervision={hang_floor: .nan}"], 1, ["supervision.hang_floor is nan, but must be finite"]),
        (
            ["model.score_conditioning={columns: [{name: a, mean: -.inf}]}"],
            1,
            ["model.score_conditioning.columns.0.mean is -inf"],
        ),
        ([f"optimizer.base_width={'9' * 400}", "trainer.dist_timeout=1e30"], 1, ["trainer.dist_timeout is 1e+30"]),
        (["data.streams.0.proportion=0.5"], 1, ["data.streams has no proportion for b"]),
        (["data.streams=[{name: a, proportion: 1, repeat: 2}]"], 1, ["data.streams.0 has a proportion and a repeat"]),
        (["validation={local: a, streams: [{name: a, repeat: 2}]}"], 1, ["validation.streams.0 has a proportion"]),
        (["data.streams=[{name: a, repeat: 0}]"], 1, ["data.streams.0.repeat is 0.0"]),
        (["data.streams=[]"], 1, ["data.streams is empty"]),
        (["data.streams=[{name: a}, {name: a}]"], 1, ["data.streams has 'a' 2 times"]),
        (
            ["data.streams=[{name: a, endpoint_url: 'https://o.example.com', profile: mine}]"],
            1,
            ["data.streams.0 has endpoint_url and profile"],
        ),
        (
            ["data.remote=s3://b", "data.streams=[{name: a, remote: 'sftp://host/a', profile: mine}]"],
            1,
            ["data.streams.0 has profile", "sftp://host/a"],
        ),
        (
            ["data.remote=s3://b", "data.streams.0.endpoint_url=objects"],
            1,
            ["data.streams.0.endpoint_url is 'objects'"],
        ),
        (["optimizer.betas=[0.9]"], 1, ["optimizer.betas is [0.9]"]),
        (["optimizer.betas=[0.9, 1]"], 1, ["optimizer.betas.1 is 1.0, but must be at least 0 and less than 1."]),
        (["objective.caption_dropout=1.5"], 1, ["objective.caption_dropout is 1.5"]),
        (["data.horizontal_flip=-0.1"], 1, ["data.horizontal_flip is -0.1"]),
        (["data.global_batch_size=0"], 1, ["data.global_batch_size is 0"]),
        (["optimizer.lr=.nan"], 1, ["optimizer.lr is nan"]),
        (["optimizer.eps=0"], 1, ["optimizer.eps is 0.0"]),
        (["seed=-1"], 1, ["seed is -1"]),
        (
            ["data.download_timeout=1e30", "operations.supervision.longest_pause=1e30"],
            1,
            ["data.download_timeout is 1e+30", "operations.supervision.longest_pause is 1e+30"],
        ),
        (
            ["samples.seed=4294967296"],
            1,
            ["samples.seed is 4294967296, but must be between 0 and 4294901760."],
        ),
        (["optimizer.base_width=64"], 1, ["only transformers without LoRA"]),
        (["optimizer.base_width=64", "task=autoencoder"], 1, ["only transformers without LoRA"]),
        (
            [
                "optimizer.base_width=64",
                "model.architecture=transformer_m",
                "model.lora={}",
                "init_from={checkpoint: a}",
            ],
            1,
            ["only transformers without LoRA"],
        ),
        (["trainer.keep_checkpoints=0"], 1, ["trainer.keep_checkpoints is 0"]),
        (["seed=-1", "data.streams=[]"], 1, ["2 problems:\n", "seed is -1", "data.streams is empty"]),
    ],
)
def test_impossible_combinations(configuration, overrides, world_size, keys):
    with pytest.raises(ConfigurationError) as caught:
        check(configuration(*overrides), world_size=world_size, side_factor=8)
    assert [key for key in keys if key not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        (["objective={zero_terminal_snr: true, min_snr_gamma: 5}"], "objective.min_snr_gamma gives"),
        (["objective={zero_terminal_snr: true, min_snr_gamma: null}"], ""),
        (["trainer.dist_timeout=300"], "Set it to 270"),
        (["trainer.dist_timeout=300", "data.num_workers=0"], ""),
        (["data.loader_timeout=0"], "Set it to 540"),
        ([*SCORES, "samples.scores={aesthetic: 21.1}"], "aesthetic=21.1"),
        ([*SCORES, "samples.scores={aesthetic: 20.9}"], ""),
        (
            ["plugins.train_dataset={path: a.B}", "validation=null", "data.caption_weights=[1, 4]"],
            "data.caption_weights has no effect",
        ),
    ],
)
def test_what_is_named_and_not_refused(configuration, changes, warning, caplog):
    check(configuration("objective.prediction_type=v_prediction", *changes), world_size=8, side_factor=8)
    assert warning in caplog.text
    assert bool(warning) == bool(caplog.text)


@pytest.mark.parametrize("world_size", [3, 6, 12, 24, 48, 96])
def test_ranks_need_not_divide_the_canonical_nodes(configuration, world_size):
    check(configuration("data.global_batch_size=96", "data.num_canonical_nodes=64"), world_size=world_size)


def test_length_of_a_run(configuration):
    assert configuration("trainer.max_duration=12BA").planned_steps() == 12


@pytest.mark.parametrize(
    ("mixing", "group", "limit", "world_size", "size"),
    [
        (Mixing.mixed, None, 128, 1, 128),
        (Mixing.mixed, None, 128, 8, 32),
        (Mixing.mixed, None, None, 8, 32),
        (Mixing.bucket, None, 12, 8, 8),
        (Mixing.mixed, None, 1, 8, 1),
        (Mixing.groups, 16, 64, 2, 16),
        (Mixing.groups, 16, 6, 2, 4),
        (Mixing.groups, 16, None, 1, 16),
    ],
)
def test_the_microbatch_is_the_largest_divisor_up_to_the_limit(mixing, group, limit, world_size, size):
    data = DataConfig(global_batch_size=256, mixing=mixing, group_size=group)
    assert microbatch_size(data, limit, world_size) == size
    assert group_size(data) == (group or 1)


def test_intervals_of_composer_are_whole_steps(configuration):
    config = configuration("trainer.max_duration=100ba")
    shares = {"0.14dur": "14ba", "0.145DUR": "15ba", "0.0001dur": "1ba", "3ba": "3ba", "12sp": "12sp", "2ep": "2ep"}
    assert {text: config.interval_of(text, "k") for text in shares} == shares


def test_legal_world_sizes():
    assert legal_world_sizes(12) == [1, 2, 3, 4, 6, 12]
    assert legal_world_sizes(12, 2) == [1, 2, 3, 6]
    assert len(legal_world_sizes(2**32)) == 33


def test_the_size_of_a_stream_is_its_own_or_in_its_name_or_a_square():
    streams = [StreamConfig(name="a"), StreamConfig(name="b", resolution=[896, 1152]), StreamConfig(name="64x32")]
    assert image_sizes(streams, 512) == [ImageSize(512, 512), ImageSize(896, 1152), ImageSize(64, 32)]
    assert str(ImageSize(896, 1152)) == "896 x 1152"


@pytest.mark.parametrize(
    ("overrides", "num_text_tokens", "is_wrong"),
    [
        ([], 64, True),  # 64 + 256.
        ([], 231, False),
        (["performance.attention=efficient"], 64, False),
        (["trainer.precision=fp32", "trainer.device=cpu"], 64, False),
        (["trainer.deterministic=true"], 64, False),
        (["model.architecture=stable_diffusion_2"], 64, False),
        (["model.token_routing={share: 0.25}"], 128, True),  # 128 + 192 in routed blocks.
        (["data.streams=[{name: 64x64}, {name: 256x320}]", "data.mixing=bucket"], 128, True),  # 128 + 320.
    ],
)
def test_lengths_that_cudnn_gets_wrong_are_refused(configuration, overrides, num_text_tokens, is_wrong):
    config = configuration("model.architecture=transformer_s", *overrides)
    context = pytest.raises(ConfigurationError, match="pytorch #196678") if is_wrong else nullcontext()
    with context:
        check(config, world_size=8, side_factor=16, num_text_tokens=num_text_tokens)


@pytest.mark.parametrize(
    ("overrides", "machine", "keys"),
    [
        (["trainer.device=gpu"], (0, False, 1), ["trainer.device is gpu"]),
        ([], (0, False, 1), ["trainer.precision is amp_bf16", "trainer.device auto"]),
        (["trainer.device=cpu"], (8, True, 1), ["trainer.precision is amp_bf16", "trainer.device cpu"]),
        ([], (8, False, 1), ["trainer.precision is amp_bf16", "trainer.precision=amp_fp16"]),
        ([], (2, True, 8), ["8 ranks", "Start 2"]),
    ],
)
def test_what_the_machine_lacks(configuration, overrides, machine, keys):
    num_gpus, bf16, local = machine
    with pytest.raises(MachineError) as caught:
        check_device(configuration(*overrides), num_gpus=num_gpus, bf16_supported=bf16, local_world_size=local)
    assert [key for key in keys if key not in str(caught.value)] == []


def test_what_the_machine_can_do(configuration):
    check_device(configuration("trainer.precision=fp32"), num_gpus=0, bf16_supported=False, local_world_size=2)
    check_device(configuration("trainer.precision=amp_fp16"), num_gpus=1, bf16_supported=False)
    check_device(configuration(), num_gpus=8, bf16_supported=True, local_world_size=8)
    assert [Device.auto.resolve(1), Device.auto.resolve(0)] == [Device.gpu, Device.cpu]


def test_a_dry_run_needs_no_locations(configuration):
    config = configuration("data.local=???", "data.streams.1.remote=???", "schedule.warmup=???")
    assert list(missing_locations(config)) == ["data.local", "data.streams.1.remote"]
    locations = ["init_from.checkpoint", "model.vae", "validation.streams", "data.streams.17.name"]
    assert [key for key in locations if not is_location(key)] == []
    assert [key for key in ("data.resolution", "run_name", "output_folder", "nothing") if is_location(key)] == []
    check(configuration("data.local=???", "data.streams=???", "validation.streams=???"), world_size=1, side_factor=8)
