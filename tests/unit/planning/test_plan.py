import json
import time
from typing import Any

import pytest

from diffusion.config.data import DataConfig, ImageSize, Mixing, Representation, StreamConfig, ValidationConfig
from diffusion.config.model import Architecture, ModelConfig, Posterior
from diffusion.config.operations import PlanConfig
from diffusion.config.schema import Config
from diffusion.config.training import (
    AlgorithmsConfig,
    EMAConfig,
    NumberFormat,
    Parallelism,
    PowerEMAConfig,
    Precision,
    TrainerConfig,
)
from diffusion.formats.shards import ShardFormat
from diffusion.models.architectures import TINY, build_vae
from diffusion.planning.amounts import absent_streams
from diffusion.planning.fleets import Failures, Fleet, format_budgets, make_budget, rate_for
from diffusion.planning.memory import ParameterCounts
from diffusion.planning.plan import Plan, format_plan, plan_run, training_flops

NUM_PARAMETERS = 865_910_724


def recipe(*, phase: int = 1, images_per_second: float | None = None, **data: Any) -> Config:
    iterations = {1: 550_000, 2: 850_000}[phase]
    return Config(
        run_name=f"phase{phase}",
        data=DataConfig(resolution=256 * phase, global_batch_size=2048, **data),
        trainer=TrainerConfig(max_duration=f"{iterations}ba", device_train_microbatch_size=16),
        algorithms=AlgorithmsConfig(ema=EMAConfig(start="800000ba") if phase == 2 else None),
        plan=PlanConfig(num_gpus=128, images_per_second=images_per_second, price_per_gpu_hour=2.0),
    )


def make_plan(config: Config, *, num_parameters: int = 1, **options: Any) -> Plan:
    return plan_run(config, counts=ParameterCounts(num_parameters), **options)


def write_index(folder, *counts):
    folder.mkdir(parents=True)
    layout = ShardFormat.of({"caption": "str"}).entry
    raw = {"basename": "shard", "bytes": 1, "hashes": {}}
    shards = [{"samples": count, "raw_data": raw, "zip_data": None, **layout} for count in counts]
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def test_what_is_not_given_is_not_known():
    plan = make_plan(recipe(), num_parameters=NUM_PARAMETERS)
    assert (plan.days, plan.gpu_hours, plan.cost) == (None, None, None)
    text = format_plan(plan)
    assert "unknown (set plan.images_per_second)" in text
    assert "unknown" not in text.replace("unknown (set plan.", ""), "only with a key to set"


def test_ranks_come_from_the_launcher_unless_the_fleet_is_named():
    config = recipe()
    assert make_plan(config, world_size=8).num_ranks == 128
    config.plan.num_gpus = None
    plan = make_plan(config, world_size=8)
    assert plan.num_ranks == 8
    assert "256 samples of each step on 8 ranks, 16 x 16" in format_plan(plan)


def test_memory_per_rank():
    plans = make_plan(recipe(phase=2), num_parameters=NUM_PARAMETERS).memory.states
    shard_grad_op, full_shard, ddp = plans
    shard = -(-NUM_PARAMETERS // 128)
    assert ddp.total == NUM_PARAMETERS * (4 + 2 + 4 + 8 + 4), "autocast keeps a copy of the weights in 16 bits"
    assert full_shard.total == shard * 20
    assert shard_grad_op.total == shard * 20 + NUM_PARAMETERS * 2
    assert [plan.is_chosen for plan in plans] == [True, False, False]
    assert make_plan(recipe(), num_parameters=NUM_PARAMETERS).memory.states[2].ema == 0


def test_all_averages_and_their_files_are_counted():
    config = recipe(phase=2)
    power = PowerEMAConfig(snapshot_interval="3000ba")
    config.algorithms.ema = EMAConfig(start="800000ba", decays=[0.9999, 0.999], power=power)
    plan = make_plan(config, num_parameters=NUM_PARAMETERS)
    assert plan.memory.states[1].ema == 4 * 4 * -(-NUM_PARAMETERS // 128)
    assert plan.memory.states[2].ema == 4 * 4 * NUM_PARAMETERS
    assert plan.checkpoints.largest_bytes == (12 + 16) * NUM_PARAMETERS
    assert plan.checkpoints.average_file_bytes == 2 * NUM_PARAMETERS
    assert plan.checkpoints.num_average_files == 2 * (283 - 266 + 1), (
        "of both widths at 801000, ..., 849000, and at the end"
    )
    assert "averages stored" in format_plan(plan)
    assert "36 files of 1.73 GB, together 62.35 GB" in format_plan(plan)
    power.snapshot_interval = "50000ba"
    assert make_plan(config).checkpoints.num_average_files == 2
    config.algorithms.ema.start = "3ep"
    assert make_plan(config).checkpoints.num_average_files is None
    assert "averages stored" not in format_plan(make_plan(recipe(phase=2)))


def test_the_chosen_way_to_spread_the_model_is_marked():
    config = recipe()
    config.trainer.reshard_after_forward = True
    assert [plan.is_chosen for plan in make_plan(config).memory.states] == [False, True, False]
    config.trainer.parallelism = Parallelism.ddp
    assert [plan.is_chosen for plan in make_plan(config).memory.states] == [False, False, True]


def test_activations_are_counted_and_bound_the_microbatch():
    config = recipe(phase=2)
    plan = make_plan(config, num_parameters=NUM_PARAMETERS)
    unit = plan.memory.reduction_bytes
    assert plan.memory.activation_bytes == 16 * 935_036_928
    assert plan.memory.largest_microbatches == {40: 16, 80: 16, 141: 16, 192: 16}, "a rank of 128 has 16 images"
    config.plan.num_gpus, config.plan.gpu_memory_gb = 8, 24
    plan = make_plan(config, num_parameters=NUM_PARAMETERS)
    assert plan.memory.largest_microbatches == {24: 8, 40: 16, 80: 64, 141: 64, 192: 128}
    assert "8 on 24 GB, 16 on 40 GB, 64 on 80 GB, 64 on 141 GB, 128 on 192 GB" in format_plan(plan)
    shard, copies = NUM_PARAMETERS // 8 * 20, NUM_PARAMETERS * 2
    assert plan.memory.gpu_bytes == pytest.approx(
        1.5e9 + shard + copies + plan.memory.reduction_bytes + 16 * 935_036_928, abs=100
    )
    assert plan.memory.reduction_bytes - unit == 4 * NUM_PARAMETERS, "with one microbatch nothing is accumulated"
    config.trainer.reduce_precision = NumberFormat.bf16
    assert make_plan(config, num_parameters=NUM_PARAMETERS).memory.reduction_bytes == unit * 4 / 6
    config.trainer.precision = Precision.fp32
    activations = make_plan(config).memory.activation_bytes
    assert activations == pytest.approx(2 * 16 * 935_036_928, rel=1e-3)
    config.trainer.activation_checkpointing = True
    assert make_plan(config).memory.activation_bytes is None


def test_a_large_batch_is_planned_at_once():
    config = recipe()
    config.data.global_batch_size, config.plan.num_gpus = 640_000, 1
    start = time.monotonic()
    assert make_plan(config).memory.largest_microbatches == {40: 128, 80: 256, 141: 512, 192: 640}
    assert time.monotonic() - start < 10, "divisors are found once"


def test_what_is_stored_and_downloaded():
    config = recipe(remote="s3://bucket")
    config.plan.num_samples = 790_000_000
    plan = make_plan(config)
    assert plan.tiers.sample_bytes is None, "of images nothing is known"
    config.plan.image_kb = 50
    plan = make_plan(config)
    assert (plan.tiers.sample_bytes, plan.tiers.data_bytes, plan.tiers.fetched_bytes) == (50_000, 39.5e12, 39.5e12)
    config.data.cache_limit = "1tb"
    assert make_plan(config).tiers.fetched_bytes == 50_000 * plan.num_images
    config.data.representation, config.data.text_embeddings = Representation.latents, True
    assert make_plan(config).tiers.sample_bytes == 16_384 + 4 * (77 + 6) + 157_696
    config.objective.posterior = Posterior.mean
    assert make_plan(config).tiers.sample_bytes == 8_192 + 4 * (77 + 6) + 157_696


def test_what_each_tier_holds_and_gives():
    config = recipe(images_per_second=11_600, representation=Representation.latents, remote="s3://bucket")
    config.plan.num_samples = 600_000_000
    tiers = make_plan(config).tiers
    total = 600_000_000 * 16_716
    assert tiers.num_nodes == 16
    assert (tiers.node_bytes, tiers.disk_bytes, tiers.epoch_bytes) == (total / 16, total / 16, 0)
    assert tiers.fetched_bytes == total
    # Of each of 8 ranks, 8 workers hold 2 batches of 16 samples: moments, tokens, placement, address and stream.
    assert tiers.memory_bytes == 8 * 8 * 2 * 16 * (16_384 + 8 * (77 + 6 + 2))
    assert "cache_limit" not in format_plan(make_plan(config))

    config.data.cache_limit = "400gb"
    plan = make_plan(config)
    assert (plan.tiers.disk_bytes, plan.tiers.epoch_bytes) == (400 * 2**30, total / 16)
    assert plan.tiers.fetched_bytes == pytest.approx(total * plan.num_images / 600_000_000)
    text = format_plan(plan)
    assert "each of 16 nodes downloads 626.85 GB in its first epoch, and the same in each later one" in text
    assert "626.85 GB per node, with data.cache_limit 429.50 GB" in text
    config.data.cache_limit = "700gb"
    assert make_plan(config).tiers.epoch_bytes == 0, "all that a node reads fits"
    config.data.num_canonical_nodes = 4
    assert make_plan(config).tiers.node_bytes == total / 4, "four nodes read the same shards"
    config.plan.gpus_per_node = 64
    assert make_plan(config).tiers.num_nodes == 2


def test_without_a_remote_nothing_is_fetched_and_each_node_holds_everything():
    config = recipe(representation=Representation.latents, streams=[StreamConfig(name="a"), StreamConfig(name="b")])
    config.plan.num_samples, total = 600_000_000, 600_000_000 * 16_716
    plan = make_plan(config)
    tiers = plan.tiers
    assert (tiers.node_bytes, tiers.disk_bytes) == (total, total)
    assert (tiers.epoch_bytes, tiers.fetched_bytes) == (0, 0)
    assert "without data.remote nothing is fetched" in format_plan(plan)
    assert "10.03 TB per node" in format_plan(plan)
    config.data.streams[1].remote = "s3://bucket/b"
    assert make_plan(config).tiers.fetched_bytes == total, "a stream may have a remote of its own"


def test_groups_of_ranks_hold_more():
    config = recipe()
    config.trainer.num_replicas = 16
    _, full_shard, _ = make_plan(config, num_parameters=NUM_PARAMETERS).memory.states
    assert full_shard.total == 16 * -(-NUM_PARAMETERS // 8)


def test_checkpoints_hold_weights_adam_and_the_average_once_it_started():
    first, second = recipe(), recipe(phase=2)
    plan = make_plan(first, num_parameters=NUM_PARAMETERS)
    assert (plan.checkpoints.largest_bytes, plan.checkpoints.num_kept) == (12 * NUM_PARAMETERS, 55)
    assert plan.checkpoints.kept_bytes == 55 * 12 * NUM_PARAMETERS
    plan = make_plan(second, num_parameters=NUM_PARAMETERS)
    assert (plan.checkpoints.largest_bytes, plan.checkpoints.num_kept) == (16 * NUM_PARAMETERS, 85)
    assert plan.checkpoints.kept_bytes == (79 * 12 + 6 * 16) * NUM_PARAMETERS
    second.trainer.keep_checkpoints = 7
    assert make_plan(second).checkpoints.kept_bytes == 12 + 6 * 16
    second.trainer.keep_every = "250000ba"
    assert make_plan(second).checkpoints.kept_bytes == 3 * 12 + 12 + 6 * 16
    second.trainer.keep_every = None
    second.trainer.save_interval = "300000ba"
    assert make_plan(second).checkpoints.kept_bytes == 12 + 12 + 16
    second.trainer.save_interval = "1ep"
    plan = make_plan(second)
    assert plan.checkpoints.num_kept is None
    assert "unknown (set trainer.save_interval in batches)" in format_plan(plan)


def test_epochs_where_the_index_files_can_be_read(tmp_path):
    write_index(tmp_path / "remote" / "a", 60_000_000, 40_000_000)
    write_index(tmp_path / "local" / "b", 300_000_000)
    roots: dict[str, Any] = {"remote": str(tmp_path / "remote"), "local": str(tmp_path / "local")}
    streams = [StreamConfig(name="a"), StreamConfig(name="b")]
    plan = make_plan(recipe(streams=streams, **roots))
    natural = plan.epoch.streams
    assert [stream.share for stream in natural] == [0.25, 0.75]
    assert "100,000,000 samples, 2.82 epochs, 25.00% of the run" in format_plan(plan)
    assert [stream.num_samples for stream in natural] == [100_000_000, 300_000_000]
    assert [stream.epochs for stream in natural] == [pytest.approx(2.816)] * 2
    streams = [StreamConfig(name="a", repeat=3.0), StreamConfig(name="b")]
    repeated = make_plan(recipe(streams=streams, **roots)).epoch.streams
    assert [stream.epochs for stream in repeated] == [pytest.approx(3 * 1126.4 / 600), pytest.approx(1126.4 / 600)]
    streams = [StreamConfig(name="a", proportion=3.0), StreamConfig(name="c", proportion=1.0)]
    mixed = make_plan(recipe(streams=streams, **roots)).epoch.streams
    assert [stream.epochs for stream in mixed] == [pytest.approx(0.75 * 11.264), None]
    assert [stream.share for stream in mixed] == [0.75, 0.25]
    streams = [StreamConfig(name="a"), StreamConfig(name="c")]
    unknown = make_plan(recipe(streams=streams, **roots)).epoch.streams
    assert [(stream.num_samples, stream.epochs) for stream in unknown] == [(100_000_000, None), (None, None)]
    assert [stream.share for stream in unknown] == [None, None]


@pytest.mark.parametrize(
    ("options", "num_steps", "dropped", "share"),
    [
        ({}, (1274 + 268) // 32, [5, 1], 1274 / 1542),
        ({"mixing": Mixing.bucket}, 39 + 8, [26, 12], 39 / 47),
        ({"mixing": Mixing.groups, "group_size": 8}, 48, [2, 4], 159 / 192),
    ],
    ids=["mixed", "bucket", "groups"],
)
def test_what_an_epoch_drops_of_each_stream(tmp_path, options, num_steps, dropped, share):
    write_index(tmp_path / "a", 1000, 274)
    write_index(tmp_path / "b", 268)
    streams = [StreamConfig(name="a"), StreamConfig(name="b")]
    config = recipe(local=str(tmp_path), streams=streams)
    config.data = DataConfig(local=str(tmp_path), streams=streams, resolution=256, global_batch_size=32, **options)
    plan = make_plan(config)
    assert plan.epoch.num_steps == num_steps
    config.trainer.save_interval = "1000ep"
    assert make_plan(config).checkpoints.num_kept == -(-550_000 // (1000 * num_steps))
    assert [(stream.draws, stream.dropped) for stream in plan.epoch.streams] == list(
        zip([1274, 268], dropped, strict=True)
    )
    shares, images = [share, 1 - share], plan.num_images
    assert [stream.share for stream in plan.epoch.streams] == pytest.approx(shares)
    assert [stream.epochs for stream in plan.epoch.streams] == pytest.approx(
        [one * images / num for one, num in zip(shares, [1274, 268], strict=True)]
    )
    assert f"an epoch drops {dropped[0]} of 1,274" in format_plan(plan)


def test_streams_of_several_sizes_count_by_their_shares(tmp_path):
    streams = [StreamConfig(name=f"{side}x{side}", proportion=share) for side, share in ((256, 0.9), (512, 0.1))]
    config = recipe(local="???", streams=streams, representation=Representation.latents, mixing=Mixing.bucket)
    config.plan.num_samples = 1_000_000
    small, large = (training_flops(config, ImageSize(side, side)) or 0 for side in (256, 512))
    fleet = Fleet(name="one", num_gpus=1, images_per_second={256: 100.0})

    def check(share: float, stored: float) -> None:
        """Compare with shares of the larger size in the run's images and in the stored ones."""
        plan, flops = make_plan(config), small + share * (large - small)
        assert plan.training_flops == pytest.approx(flops)
        assert rate_for(fleet, config) == pytest.approx(100 * small / flops)
        assert plan.tiers.data_bytes == pytest.approx((plan.num_samples or 0) * (16_716 + stored * 49_152), rel=1e-4)
        assert plan.memory.activation_bytes == 16 * 935_036_928, "of the larger"

    check(0.1, 1.0)  # A proportion says how often a stream is drawn, not how much of it is stored.
    for stream in streams:
        stream.proportion = None
    check(1.0, 1.0)
    write_index(tmp_path / "256x256", 40_960)
    write_index(tmp_path / "512x512", 20_480)
    config.data.local, streams[1].repeat = str(tmp_path), 2.0
    check(0.5, 1 / 3)


def test_an_epoch_that_cannot_be(tmp_path):
    write_index(tmp_path / "a", 100)
    config = recipe(local=str(tmp_path), streams=[StreamConfig(name="a")])
    text = format_plan(make_plan(config))
    assert "This run would not start: the streams give 100 samples an epoch, less than data.global_batch_size" in text


def test_folders_that_are_not_here_are_told(tmp_path):
    write_index(tmp_path / "a", 100)
    streams = [StreamConfig(name="a"), StreamConfig(name="b"), StreamConfig(name="c", remote="s3://bucket/c")]
    config = recipe(local=str(tmp_path), streams=streams)
    ((key, text),) = absent_streams(config).items()
    assert key == "data.streams"
    assert text.startswith(f"not on this machine: {tmp_path / 'b'}; s3://bucket/c/index.json: ")
    config.validation = ValidationConfig(local="/nowhere/held-out", streams=[StreamConfig(name="a")])
    assert absent_streams(config)["validation.streams"] == "not on this machine: /nowhere/held-out/a"
    config.validation = ValidationConfig(local="${data.local}/v", streams=[StreamConfig(name="a")])
    assert "validation.streams" not in absent_streams(config)
    assert absent_streams(recipe(local="???", streams=streams)) == {}


def test_a_vae_that_cannot_be_read_here_is_an_assumption(tmp_path):
    config = recipe()
    fleet = Fleet(name="one", num_gpus=1, images_per_second={256: 100.0})

    def texts(**weights: str) -> list[str]:
        config.model = ModelConfig(architecture=Architecture.tiny, **weights)
        budget = make_budget([config], [fleet], failures=Failures())
        return [format_plan(make_plan(config)), format_budgets([budget], Failures())]

    for weights in ({"vae": "/nowhere/a"}, {"vae": "some/name", "pretrained": "???"}, {"pretrained": "/nowhere/a"}):
        assert all(f"{weights.get('vae', '/nowhere/a/vae')} is no folder here" in text for text in texts(**weights))
    build_vae(TINY).save_config(tmp_path / "vae")
    for weights in ({}, {"pretrained": "???"}, {"vae": str(tmp_path / "vae")}, {"pretrained": str(tmp_path)}):
        assert not any("no folder here" in text for text in texts(**weights))


def test_text():
    streams = [StreamConfig(name="256-512")]
    config = recipe(images_per_second=11_600, local="???", streams=streams)
    plan = make_plan(config, num_parameters=NUM_PARAMETERS)
    text = format_plan(plan, {"data.local": "Root of the data set."})
    for line in [
        "Plan of phase1",
        "1,126,400,000 = 550,000 iterations x 2,048",
        "1.12 days on 128 GPUs",
        "865,910,724 trained",
        "  data.local: Root of the data set.",
        "<- chosen",
        "3.79 GB per microbatch of 16",
    ]:
        assert line in text
