import pytest

from diffusion.config.checks import check, is_location, missing_locations
from diffusion.config.data import DataConfig, StreamConfig, ValidationConfig
from diffusion.config.loading import from_dict, to_dict
from diffusion.config.machine import check_machine, resolve_device
from diffusion.config.schema import Config
from diffusion.config.training import Device, TrainerConfig
from diffusion.config.tree import apply_override, from_plain
from diffusion.errors import ConfigurationError, MachineError


def configuration(*overrides: str) -> Config:
    config = Config(
        run_name="r",
        data=DataConfig(
            local="/data",
            streams=[StreamConfig(name="a"), StreamConfig(name="b")],
            resolution=256,
            global_batch_size=2048,
        ),
        validation=ValidationConfig(local="/held-out"),
        trainer=TrainerConfig(max_duration="550000ba"),
    )
    root = from_plain(to_dict(config), "test")
    for override in overrides:
        apply_override(root, override)
    return from_dict(Config, root.plain(), "test")


def failure(*overrides: str, world_size: int = 128) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check(configuration(*overrides), world_size=world_size, vae_factor=8)
    return str(caught.value)


@pytest.mark.parametrize("name", ["a", "a/b", "/a", "a/../b", "..a"])
def test_names_of_runs_may_have_folders(name):
    check(configuration(f"run_name={name}"), world_size=128, vae_factor=8)


@pytest.mark.parametrize("world_size", [1, 2, 8, 64, 128])
def test_the_recipe_passes(world_size):
    overrides = ["trainer.device_train_microbatch_size=16", "algorithms.ema.start=500000ba"]
    check(configuration(*overrides), world_size=world_size, vae_factor=8)


def test_cuda_graphs_with_ddp_and_one_microbatch():
    graphs = ["performance.cuda_graphs=true", "trainer.parallelism=ddp", "trainer.device_train_microbatch_size=16"]
    check(configuration(*graphs), world_size=128, vae_factor=8)


@pytest.mark.parametrize(
    ("overrides", "world_size", "messages"),
    [
        (
            [],
            12,
            [
                "data.global_batch_size is 2048, which cannot be divided among 12 ranks",
                "Start 8 or 16 ranks (legal are 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)",
                "or change it to 2040 or 2052",
            ],
        ),
        (
            ["data.global_batch_size=96", "data.mixing=groups", "data.group_size=8"],
            5,
            ["data.global_batch_size is 96, which cannot be divided among 5 ranks", "legal are 1, 2, 3, 4, 6, 12)"],
        ),
        (
            ["performance.cuda_graphs=true"],
            128,
            ["performance.cuda_graphs is true with trainer.parallelism fsdp", "Set trainer.parallelism=ddp."],
        ),
        (
            [
                "performance={cuda_graphs: true, compilation: none}",
                "trainer.parallelism=ddp",
                "trainer.activation_checkpointing=true",
                "trainer.device_train_microbatch_size=16",
                "data.mixing=bucket",
                "data.streams=[{name: 256x256}, {name: 192x320}]",
            ],
            64,
            [
                "performance.cuda_graphs is true with performance.compilation none",
                "performance.cuda_graphs is true with trainer.activation_checkpointing",
                "performance.cuda_graphs is true, and a rank has 32 samples in several microbatches",
                "performance.cuda_graphs is true with streams of several sizes",
            ],
        ),
        (["data.resolution=260"], 1, ["data.resolution is 260, which is not a multiple of 8", "Use 256 or 264."]),
        (
            ["trainer.max_duration=3ep"],
            1,
            ["trainer.max_duration is '3ep', but the length of a run is given in batches"],
        ),
        (["trainer.max_duration=0ba"], 1, ["trainer.max_duration is '0ba', but a run has at least one batch"]),
        (
            ["trainer.max_duration='10'"],
            1,
            ["trainer.max_duration is '10', but the length of a run is given in batches (550000ba): epochs depend"],
        ),
        (["run_name=''"], 1, ["run_name is empty. Give it a value"]),
        (["run_name=' '"], 1, ["run_name is empty. Give it a value"]),
        (
            ["run_name=//"],
            1,
            ["run_name is '//', which is no folder of its own below that of all runs. Give it a name"],
        ),
        (["run_name=a/.."], 1, ["run_name is 'a/..', which is no folder"]),
        (["run_name=a/../../b"], 1, ["run_name is 'a/../../b', which is no folder"]),
        (["output_folder=''"], 1, ["output_folder is empty. Give it a value, or leave it out."]),
        (["trainer.checkpoint_folder=''"], 1, ["trainer.checkpoint_folder is empty."]),
        (["data.remote=''"], 1, ["data.remote is empty."]),
        (["validation.local=''"], 1, ["validation.local is empty."]),
        (["data.streams.1.name=''"], 1, ["data.streams.1.name is empty. Give it a value"]),
        (["data.streams.1.local=''"], 1, ["data.streams.1.local is empty."]),
        (
            ["data.local=s3://bucket/x"],
            1,
            [
                "data.local is 's3://bucket/x', but must be a folder of this machine. Set data.remote to it, and "
                "data.local to a cache."
            ],
        ),
        (
            ["validation.local=gs://b/x"],
            1,
            ["validation.local is 'gs://b/x', but must be a folder", "validation.remote"],
        ),
        (
            ["data.streams.0.local=s3://b/x"],
            1,
            ["data.streams.0.local is 's3://b/x'", "Set data.streams.0.remote to it"],
        ),
        (
            ["validation.streams=[{name: a, local: s3://b/x}]"],
            1,
            ["validation.streams.0.local is 's3://b/x', but must be a folder of this machine"],
        ),
        (["trainer.save_interval=0ba"], 1, ["trainer.save_interval is '0ba', but an interval must be longer"]),
        (["trainer.eval_interval=often"], 1, ["trainer.eval_interval is 'often', which is not a time"]),
        (
            ["trainer.max_duration=1000ba"],
            1,
            ["schedule.warmup is '10000ba', longer than the run (trainer.max_duration is '1000ba')", "=0.1dur"],
        ),
        (["schedule.warmup=8sp"], 1, ["schedule.warmup is '8sp', but is counted in batches or as a share of the run"]),
        (["schedule.warmup=1ep"], 1, ["schedule.warmup is '1ep', but is counted in batches or as a share of the run"]),
        (["samples.interval=' 1ba'"], 1, ["samples.interval is ' 1ba', which is not a time"]),
        (
            ["algorithms.ema.start=550000ba"],
            1,
            ["algorithms.ema.start is '550000ba', at or after the end of the run", "algorithms.ema=null"],
        ),
        (["algorithms.ema.start=1dur"], 1, ["algorithms.ema.start is '1dur', at or after the end"]),
        (
            ["algorithms.ema={start: 1ba, decays: [0.9, 1]}"],
            1,
            ["algorithms.ema.decays has 1.0, but a decay must be at least 0 and below"],
        ),
        (
            ["algorithms.ema={start: 1ba, power: {relative_widths: [0.1, 0.3, 0.1], snapshot_interval: 5ep}}"],
            1,
            ["widths has 0.3, but", "below 0.2887, that of the plain mean", "the same average twice", "'5ep', but is"],
        ),
        (["algorithms.ema.start=5ep"], 1, ["algorithms.ema.start is '5ep', but is counted in batches"]),
        (
            ["algorithms.ema={start: 1ba, interval: 550001ba}"],
            1,
            ["algorithms.ema.interval is '550001ba', of which no multiple lies between algorithms.ema.start"],
        ),
        (
            ["algorithms.ema={start: 540000ba, interval: 100000ba}"],
            1,
            ["algorithms.ema.interval is '100000ba', of which no multiple lies"],
        ),
        (
            ["samples.num_inference_steps=1001"],
            1,
            ["samples.num_inference_steps is 1001, but must be between 1 and 1000."],
        ),
        (
            ["autoencoder.initial_logvar=.nan"],
            1,
            ["autoencoder.initial_logvar is nan, but must be between -30 and 20 and finite."],
        ),
        (
            ["operations.guard.skip_steps=[3, -1]"],
            1,
            ["operations.guard.skip_steps is [3, -1], but steps are counted from 0."],
        ),
        (["data.validate_hash=shake_128"], 1, ["data.validate_hash is 'shake_128', which is no hash"]),
        (
            ["plugins.train_dataset={path: a.B}", "data.streams=???"],
            1,
            ["validation.streams is null with plugins.train_dataset", "validation.streams=[{name: 256-512}]"],
        ),
        (
            ["operations.heartbeat_folder=s3://bucket/beats"],
            1,
            ["operations.heartbeat_folder is 's3://bucket/beats', but signs of life are files"],
        ),
        (["algorithms.ema={start: 1ba, decays: []}"], 1, ["algorithms.ema.decays is empty, so that there is no"]),
        (["algorithms.ema={start: 1ba, interval: 8sp}"], 1, ["algorithms.ema.interval is '8sp', but updates are"]),
        (
            ["data.cache_limit=500gb", "data.streams.0.remote=s3://b/a"],
            1,
            ["data.cache_limit is '500gb', but stream 'b' has no remote", "delete the only copy"],
        ),
        (["data.cache_limit=lots", "data.remote=s3://b"], 1, ["data.cache_limit is 'lots', which is not a size"]),
        (
            ["data.representation=latents", "data.crop=random"],
            1,
            ["data.crop is random with data.representation latents"],
        ),
        (
            ["data.representation=latents", "data.horizontal_flip=0.5"],
            1,
            ["data.horizontal_flip is 0.5 with data.representation latents"],
        ),
        (
            ["data.representation=latents", "task=autoencoder", "trainer.parallelism=ddp"],
            1,
            ["task is autoencoder with data.representation latents"],
        ),
        (
            ["autoencoder.adversarial_weight=0.1", "operations.guard={spike_factor: 3}"],
            1,
            ["operations.guard.spike_factor is set with autoencoder.adversarial_weight"],
        ),
        (["task=autoencoder"], 1, ["task is autoencoder with trainer.parallelism fsdp"]),
        (
            ["task=autoencoder", "init_from.checkpoint=runs/vae", "model.lora={rank: 4}"],
            1,
            ["init_from is set with task autoencoder", "model.lora is set with task autoencoder"],
        ),
        (
            ["autoencoder.adversarial_start=1ep"],
            1,
            ["autoencoder.adversarial_start is '1ep', but is counted in batches"],
        ),
        (
            ["objective.zero_terminal_snr=true"],
            1,
            ["objective.zero_terminal_snr is true with objective.prediction_type epsilon", "=v_prediction"],
        ),
        (
            ["trainer.reshard_after_forward=true", "trainer.parallelism=ddp"],
            1,
            ["trainer.reshard_after_forward is true with trainer.parallelism ddp"],
        ),
        (
            ["data.streams.0.proportion=0.5"],
            1,
            ["data.streams gives a proportion for some streams but not for b: give one for all"],
        ),
        (
            ["data.streams=[{name: a, proportion: 1, repeat: 2}]"],
            1,
            ["data.streams: stream 'a' has a proportion and a repeat"],
        ),
        (["data.streams=[{name: a, repeat: 0}]"], 1, ["the repeat of stream 'a' is 0.0, but must be greater than 0"]),
        (["data.streams=[]"], 1, ["data.streams is empty"]),
        (["data.streams=[{name: a}, {name: a}]"], 1, ["data.streams holds 'a' 2 times"]),
        (["validation.streams=[{name: v}, {name: v}]"], 1, ["validation.streams holds 'v' 2 times"]),
        (["optimizer.betas=[0.9]"], 1, ["optimizer.betas is [0.9], but must be two numbers"]),
        (["optimizer.betas=[0.9, 1]"], 1, ["optimizer.betas is [0.9, 1.0]"]),
        (["objective.caption_dropout=1.5"], 1, ["objective.caption_dropout is 1.5, but must be between 0 and 1."]),
        (["data.horizontal_flip=-0.1"], 1, ["data.horizontal_flip is -0.1, but must be between 0 and 1."]),
        (["data.global_batch_size=0"], 1, ["data.global_batch_size is 0, but must be at least 1."]),
        (["data.num_workers=-1"], 1, ["data.num_workers is -1, but must be at least 0."]),
        (["optimizer.lr=.nan"], 1, ["optimizer.lr is nan, but must be at least 0 and finite."]),
        (["optimizer.eps=0"], 1, ["optimizer.eps is 0.0, but must be greater than 0 and finite."]),
        (["seed=-1"], 1, ["seed is -1, but seeds are integers from 0 to 4294967295"]),
        (["samples.seed=4294967296"], 1, ["samples.seed is 4294967296"]),
        (["trainer.keep_checkpoints=0"], 1, ["trainer.keep_checkpoints is 0: keep at least 1, or all with -1."]),
        (["loggers.stream_loss_interval=0"], 1, ["loggers.stream_loss_interval is 0, but must be at least 1."]),
        (["data.validate_hash=crc"], 1, ["data.validate_hash is 'crc'"]),
    ],
)
def test_impossible_combinations(overrides, world_size, messages):
    text = failure(*overrides, world_size=world_size)
    assert [message for message in messages if message not in text] == []


def test_several_mistakes_are_told_at_once():
    assert failure("seed=-1", "data.streams=[]", world_size=1).startswith("2 mistakes:\n  - seed is -1")


@pytest.mark.parametrize("world_size", [3, 6, 12, 24, 48, 96])
def test_ranks_need_not_divide_the_canonical_nodes(world_size):
    check(configuration("data.global_batch_size=96", "data.num_canonical_nodes=64"), world_size=world_size)


@pytest.mark.parametrize("shuffle", ["shard", "block", "none"])
def test_what_is_shuffled_is_one_of_three(shuffle):
    assert configuration(f"data.shuffle={shuffle}").data.shuffle.value == shuffle
    with pytest.raises(ConfigurationError, match=r"data.shuffle"):
        configuration("data.shuffle=py1s")


@pytest.mark.parametrize(
    ("overrides", "machine", "message"),
    [
        (["trainer.device=gpu"], (0, False, 1), "trainer.device is gpu, but no GPU is visible here"),
        ([], (0, False, 1), "trainer.precision is amp_bf16 with trainer.device auto, and no GPU is visible here"),
        (
            ["trainer.device=cpu"],
            (8, True, 1),
            "trainer.precision is amp_bf16 with trainer.device cpu, which needs a GPU",
        ),
        ([], (8, False, 1), "trainer.precision is amp_bf16, which the GPUs here cannot compute"),
        ([], (2, True, 8), "8 ranks were started on this machine, which shows 2 GPUs. Start 2"),
    ],
)
def test_what_the_machine_lacks(overrides, machine, message):
    num_gpus, bf16, local = machine
    with pytest.raises(MachineError) as caught:
        check_machine(configuration(*overrides), num_gpus=num_gpus, bf16_supported=bf16, local_world_size=local)
    assert message in str(caught.value)


def test_what_the_machine_can_do():
    check_machine(configuration("trainer.precision=fp32"), num_gpus=0, bf16_supported=False, local_world_size=2)
    check_machine(configuration("trainer.precision=amp_fp16"), num_gpus=1, bf16_supported=False)
    check_machine(configuration(), num_gpus=8, bf16_supported=True, local_world_size=8)
    assert [resolve_device(Device.auto, 1), resolve_device(Device.auto, 0)] == [Device.gpu, Device.cpu]


def test_locations_are_what_a_dry_run_can_do_without():
    config = configuration("data.local=???", "data.streams.1.remote=???", "schedule.warmup=???")
    assert list(missing_locations(config)) == ["data.local", "data.streams.1.remote"]
    assert is_location("init_from.checkpoint")
    assert not is_location("data.resolution")
