"""Budgets of the published fleets are the published figures, and those of others follow from them."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diffusion.config.loading import load_config
from diffusion.config.locations import is_location
from diffusion.config.model import Architecture, ModelConfig
from diffusion.config.training import Parallelism
from diffusion.errors import ConfigurationError
from diffusion.planning.fleets import (
    A100_FLEETS,
    A100_RATES,
    PUBLISHED_NETWORK,
    Failures,
    Fleet,
    fleet_called,
    fleets_from_benchmark,
    format_budgets,
    make_budget,
    plan_on,
    predict_images_per_second,
    rate_for,
    read_fleets,
)
from diffusion.planning.memory import parameter_counts
from scripts.plan import main as plan_command
from tests.tools.training_runs import ROOT

FAILURES = Failures()
SD2: dict[str, Any] = {"num_parameters": 865_910_724, "global_batch_size": 2048}
MEASURED: dict[str, Any] = {"network": PUBLISHED_NETWORK, "parallelism": Parallelism.fsdp}
PUBLISHED = {8: (81.33, 31_230), 16: (40.42, 31_043), 32: (20.06, 30_805), 64: (10.14, 31_146), 128: (5.51, 33_874)}


def recipe(*overrides):
    return [load_config(f"yamls/phase{phase}.yaml", list(overrides), may_lack=is_location) for phase in (1, 2)]


@pytest.fixture(scope="module")
def budgets():
    return {fleet.num_gpus: make_budget(recipe(), [fleet] * 2, failures=FAILURES) for fleet in A100_FLEETS}


def test_days_and_cost_of_every_published_fleet(budgets):
    for num_gpus, (days, cost) in PUBLISHED.items():
        assert budgets[num_gpus].totals["days"] == pytest.approx(days, abs=0.005)
        assert budgets[num_gpus].totals["cost"] == pytest.approx(cost, rel=1e-4)
        assert budgets[num_gpus].totals["gpu_hours"] == pytest.approx(24 * num_gpus * budgets[num_gpus].totals["days"])
        assert [plan.num_images for plan in budgets[num_gpus].plans] == [1_126_400_000, 1_740_800_000]


def test_a_fleet_without_a_price():
    """Two weeks of 1.8 steps of 2,048 images a second."""
    config = load_config("yamls/phase1.yaml", ["trainer.max_duration=2177280ba"], may_lack=is_location)
    fleet = Fleet(name="128 A100", num_gpus=128, images_per_second={256: 1.8 * 2048})
    budget = make_budget([config], [fleet], failures=FAILURES)
    assert budget.plans[0].images_per_second == pytest.approx(3_686.4)
    assert budget.totals["days"] == pytest.approx(14)
    assert budget.totals["cost"] is None


def test_other_resolutions_and_networks_go_by_operations():
    fleet = A100_FLEETS[0]
    first = recipe()[0]
    assert rate_for(fleet, replace(first, data=replace(first.data, resolution=384))) == pytest.approx(
        1_100 * 539.31 / 1263, rel=0.01
    )
    small = replace(first, model=ModelConfig(architecture=Architecture.tiny))
    small.data.resolution = 32
    assert rate_for(fleet, small) == pytest.approx(1_100 * 539_310_899_200 / 606_404_608)
    unknown: dict[str, Any] = {"down_block_types": ["AttnDownBlock2D", "CrossAttnDownBlock2D"]}
    with pytest.raises(ConfigurationError, match=r"model\.network"):
        rate_for(fleet, replace(first, model=ModelConfig(architecture=Architecture.tiny, network=unknown)))


def test_storage_and_egress_add_to_it(budgets):
    configs = recipe("plan.num_samples=790000000", "data.remote=???")
    prices = {"storage_per_tb_month": 23.0, "egress_per_tb": 90.0}
    budget = make_budget(configs, A100_FLEETS[-1:] * 2, failures=FAILURES, **prices)
    first, second = budget.plans
    assert first.tiers.sample_bytes == 2 * 2 * 4 * 32 * 32 + 4 * (77 + 6)
    assert first.tiers.data_bytes == pytest.approx(13.2e12, rel=0.01)
    months = [(plan.days or 0) / 30.4375 for plan in (first, second)]
    held = [((plan.tiers.data_bytes or 0) + (plan.checkpoints.kept_bytes or 0)) / 1e12 for plan in (first, second)]
    assert budget.totals["storage_cost"] == pytest.approx(23 * sum(a * b for a, b in zip(months, held, strict=True)))
    assert budget.totals["egress_cost"] == pytest.approx(
        90 * 790e6 * (first.tiers.sample_bytes + (second.tiers.sample_bytes or 0)) / 1e12
    )
    assert budget.totals["cost"] == pytest.approx(
        (budgets[128].totals["cost"] or 0) + (budget.totals["storage_cost"] or 0) + (budget.totals["egress_cost"] or 0)
    )
    power = "algorithms.ema={start: 0ba, power: {relative_widths: [0.1], snapshot_interval: 10000ba}}"
    more = make_budget(recipe("plan.num_samples=790000000", power), A100_FLEETS[-1:] * 2, failures=FAILURES, **prices)
    stored = [0.0 if run is None else run for run in (more.runs[0].storage_cost, budget.runs[0].storage_cost)]
    files, (first, _) = 55 * 2 * 865_910_724, more.plans
    kept = (first.checkpoints.kept_bytes or 0) - (budget.plans[0].checkpoints.kept_bytes or 0)
    assert stored[0] - stored[1] == pytest.approx(23 * months[0] * (files + kept) / 1e12)
    without_remote = recipe("plan.num_samples=790000000")
    budget = make_budget(without_remote, A100_FLEETS[-1:] * 2, failures=FAILURES, egress_per_tb=90)
    assert budget.totals["egress_cost"] == 0


def test_a_table_of_nothing_but_unknowns_is_left_out(budgets):
    configs = recipe("data.representation=images", "trainer.save_interval=1ep")
    title = "Data and checkpoints"
    assert title in format_budgets([budgets[8]], FAILURES)
    of_images = format_budgets([make_budget(configs, A100_FLEETS[:1] * 2, failures=FAILURES)], FAILURES)
    assert title not in of_images
    assert "VAE" in of_images and "model.alignment" in of_images, "what is not counted"


def test_memory_and_the_largest_microbatch(budgets):
    first, second = budgets[8].plans
    assert (first.memory.activation_bytes, second.memory.activation_bytes) == (256 * 236_814_720, 64 * 935_036_928)
    linear = 23 * (4 * 1024 * 1025 + 4096 * 1025 + 1024 * 4097)  # Of the text encoder's layers, in 16 bits.
    assert first.memory.frozen_bytes == 4 * (83_653_863 + 340_387_840) - 2 * linear
    assert first.memory.largest_microbatches == {40: 64, 80: 256, 141: 256, 192: 256}
    assert second.memory.largest_microbatches == {40: 16, 80: 64, 141: 64, 192: 128}
    small = replace(A100_FLEETS[0], gpu_memory_bytes=8e9)
    sizes = make_budget(recipe()[:1], [small], failures=FAILURES).plans[0].memory.largest_microbatches
    assert sizes is not None
    assert sizes[8] == 0


def test_the_command(capsys, tmp_path):
    """Two runs on the published fleets, and on one of the user's own."""
    runs = [str(ROOT / "yamls" / f"phase{phase}.yaml") for phase in (1, 2)]
    runs.append("data.remote=s3://bucket")
    plan_command([*runs, "--samples", "790e6", "300e6", "--storage-price", "23", "--json", str(tmp_path / "plan.json")])
    printed = capsys.readouterr().out
    for part in ("1,126,400,000 images (phase1)", "81.33", "$33,875", "3.79 GB", "16,716", "GPU-hours"):
        assert part in printed
    assert "825.35 GB" in printed, "that a node reads"
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [budget["runs"][0]["fleet"]["num_gpus"] for budget in written] == [8, 16, 32, 64, 128]
    assert written[-1]["days"] == pytest.approx(5.51, abs=0.005)

    path = tmp_path / "fleets.json"
    path.write_text(json.dumps([{"name": "ours", "num_gpus": 64, "images_per_second": {"256": 23_200}}]))
    plan_command([runs[0], "trainer.max_duration=275000ba", "--fleets", str(path)])
    assert "0.28" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="--samples"):
        plan_command([*runs, "--samples", "1"])
    with pytest.raises(ConfigurationError, match=r"plan\.num_samples is 0"):
        plan_command([*runs, "--samples", "1", "0.5"])
    with pytest.raises(ConfigurationError, match=r"schedule\.warmup"):
        plan_command([*runs, "trainer.max_duration=5ba"])
    with pytest.raises(ConfigurationError, match="YAML of at least one run"):
        plan_command(["seed=3"])
    with pytest.raises(ConfigurationError, match="--price is for the rows of --measured"):
        plan_command([*runs, "--price", "3.5"])

    plan_command([*runs, "--fleet", "phase1=32xA100", "phase2=64xA100"])
    assert "phase1 on 32 A100, phase2 on 64 A100" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"--fleet .*phase1, phase2"):
        plan_command([*runs, "--fleet", "phase1=32xA100"])


def test_a_fleet_for_each_run_costs_what_each_costs_alone(budgets):
    small, large = A100_FLEETS[2], A100_FLEETS[4]
    mixed = make_budget(recipe(), [small, large], failures=FAILURES)
    assert mixed.runs == [budgets[32].runs[0], budgets[128].runs[1]]
    assert mixed.name == "phase1 on 32 A100, phase2 on 128 A100"
    first, second = mixed.runs
    assert mixed.totals["cost"] == (first.cost or 0) + (second.cost or 0) > 0
    assert fleet_called("32xa100", A100_FLEETS) is small and fleet_called("32 A100", A100_FLEETS) is small
    with pytest.raises(ConfigurationError, match="32xH200"):
        fleet_called("32xH200", A100_FLEETS)


@pytest.mark.parametrize(
    ("overrides", "illegal", "legal", "reason"),
    [
        ([], 24, 8, "24 ranks cannot have equal numbers of samples"),
        (["data.mixing=groups", "data.group_size=512"], 8, 4, "8 ranks cannot have equal numbers of groups"),
        (["trainer.num_replicas=8"], 4, 8, "does not divide 4 ranks"),
    ],
)
def test_a_fleet_on_which_a_run_cannot_start_is_named(overrides, illegal, legal, reason):
    fleets = [replace(A100_FLEETS[0], num_gpus=num, name=name) for num, name in ((illegal, "odd"), (legal, "fit"))]
    text = format_budgets([make_budget(recipe(*overrides), [one] * 2, failures=FAILURES) for one in fleets], FAILURES)
    assert "would not start on odd" in text and "would not start on fit" not in text and reason in text


def test_fleets_from_files(tmp_path):
    path = tmp_path / "fleets.json"
    path.write_text(json.dumps([{"name": "ours", "num_gpus": 64, "images_per_second": {"256": 30_000}}]))
    assert read_fleets(path) == [Fleet(name="ours", num_gpus=64, images_per_second={256: 30_000.0})]
    texts = {"num_gpus": "64", "price_per_gpu_hour": "3.5", "images_per_second": {"256": "30000"}}
    path.write_text(json.dumps([{"name": "ours", **texts}]))
    assert read_fleets(path) == [
        Fleet(name="ours", num_gpus=64, price_per_gpu_hour=3.5, images_per_second={256: 30_000.0})
    ]
    path.write_text('[{"name": "ours"}]')
    with pytest.raises(ConfigurationError, match=str(path)):
        read_fleets(path)
    wrong = ({"num_gpus": 0}, {"num_gpus": 2.5}, {"images_per_second": {"256": 0}}, {"gpu_memory_bytes": 0},
             {"gpu_memory_bytes": "80 GB"}, {"network": 0}, {"price_per_gpu_hour": -1},
             {"num_gpus": math.nan})  # fmt: skip
    for one in wrong:
        path.write_text(json.dumps([{"name": "ours", **texts, **one}]))
        with pytest.raises(ConfigurationError, match=str(path)):
            read_fleets(path)
    path.write_text(json.dumps([{"name": "ours", **texts, "gpu_memory_bytes": "80e9"}]))
    assert read_fleets(path)[0].gpu_memory_bytes == 80e9
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match="empty"):
        read_fleets(path)

    def measured(name: str, kind: str, size: int, rate: float) -> str:
        parameters = {"architecture": "stable_diffusion_2", "resolution": 256, "microbatch_size": size}
        result = {"images_per_second": rate, "deviation": 0.02, "num_gpus": 1}
        line = {"name": name, "kind": kind, "parameters": parameters, "result": result}
        return json.dumps({**line, "machine": {"device": "H200"}}) + "\n"

    failed = json.dumps({"name": "trainer/256/256", "kind": "trainer", "error": "out of memory"}) + "\n"
    rows = [measured("trainer/256/16", "trainer", 16, 300.0), measured("trainer/256/64", "trainer", 64, 500.0)]
    path.write_text("".join([*rows, measured("step/256/64/loop", "step", 64, 900.0), failed]))
    options = {**MEASURED, "architecture": Architecture.stable_diffusion_2}
    one, many = fleets_from_benchmark(path, [1, 128], price_per_gpu_hour=4.0, **options)
    first = recipe()[0]
    assert rate_for(one, first) == pytest.approx(500, rel=0.01)
    assert 64 * 500 * 0.3 < rate_for(many, first) < 128 * 500
    assert one.deviation == 0.02
    path.write_text("{}")
    with pytest.raises(ConfigurationError, match=str(path)):
        fleets_from_benchmark(path, [1], **options)


def test_a_step_is_not_shorter_than_the_host_needs():
    """Rows of 2026-11-27: at 256 px the host needed 0.289 s for a step, which is the time of 128 images."""
    path = ROOT / "benchmarks" / "2026-11-27-H200.jsonl"
    options = {**MEASURED, "architecture": Architecture.stable_diffusion_2}
    few, many = fleets_from_benchmark(path, [8, 128], **options)
    first, second, small = (
        load_config(f"yamls/{name}.yaml", may_lack=is_location) for name in ("phase1", "phase2", "small_256")
    )
    assert rate_for(many, first) == pytest.approx(2048 / 0.289, rel=0.02)
    assert rate_for(many, second) == pytest.approx(2048 / 0.289, rel=0.02)
    assert rate_for(few, second) == pytest.approx(8 * 157, rel=0.02)
    sharded = replace(small, trainer=first.trainer)
    assert rate_for(few, sharded) == pytest.approx(256 / 0.289, rel=0.02), "nor is that of a smaller model"
    [ddp] = fleets_from_benchmark(path, [8], **options | {"parallelism": small.trainer.parallelism})
    assert rate_for(ddp, small) == pytest.approx(256 / 0.179, rel=0.02)
    later = path.with_name("2026-11-28-H200.jsonl")
    [ddp] = fleets_from_benchmark(later, [8], **options | {"parallelism": small.trainer.parallelism})
    assert ddp.host_seconds == 0, "no row of DDP"


def test_each_run_has_the_measured_rate_of_its_own_batch_and_architecture(tmp_path):
    rows, plan = tmp_path / "rows.jsonl", tmp_path / "plan.json"
    line = {"name": "trainer", "kind": "trainer", "machine": {"device": "H200"}}
    for architecture, rate, idle in (("transformer_l", 900.0, 0.0), ("stable_diffusion_2", 500.0, 0.5)):
        parameters = {"architecture": architecture, "resolution": 256}
        result = {"images_per_second": rate, "deviation": 0.02, "num_gpus": 1, "idle": idle, "seconds": 0.5}
        with rows.open("a") as file:
            file.write(json.dumps({**line, "parameters": parameters, "result": result}) + "\n")

    def rates(*names: str, more: Sequence[str] = ()) -> dict[str, float]:
        runs = [str(ROOT / f"yamls/{name}.yaml") for name in names]
        plan_command([*runs, "--measured", str(rows), "--gpus", "8", "--json", str(plan), *more])
        [budget] = json.loads(plan.read_text())
        return {run["plan"]["run_name"]: run["plan"]["images_per_second"] for run in budget["runs"]}

    alone = rates("small_256") | rates("phase1")
    assert rates("small_256", "phase1") == rates("phase1", "small_256") == alone
    assert alone["phase1"] == pytest.approx(8 * 500, rel=0.02)
    assert rates("phase1", more=["--network-gb", "4"]) == rates("phase1"), "one node"
    slow = ["--network-gb", "4", "plan.gpus_per_node=4"]
    seconds = 6 * SD2["num_parameters"] * 7 / 8 / 4e9 + 2048 / 4000 / 3  # A third of the computing hides nothing.
    assert rates("phase1", more=slow)["phase1"] == pytest.approx(2048 / seconds, rel=0.02)
    sent = 6 * parameter_counts(load_config("yamls/small_256.yaml", may_lack=is_location)).trained * 7 / 8 / 4e9
    computing = 256 / rates("small_256")["small-256"]
    small = rates("small_256", more=slow)["small-256"]
    assert small == pytest.approx(256 / (sent + computing / 3), rel=0.05), "only computing goes by operations"
    [large] = fleets_from_benchmark(rows, [1], architecture=Architecture.transformer_l, **MEASURED)
    assert large.images_per_second[256] == pytest.approx(900, rel=0.02)


def test_a_save_that_costs_nothing_is_made_each_step():
    config = load_config("yamls/phase1.yaml", may_lack=is_location)
    run = plan_on(config, A100_FLEETS[0], failures=Failures(gpu_hours_between=1e4, save_seconds=0))
    assert run.save_interval_steps == 1


@pytest.mark.parametrize(("hours", "save"), [(10, 30), (80, 300), (1_250, 60)])
def test_the_recommended_interval_is_about_the_best(hours, save):
    """By the mean duration of a run (Daly 2006, equation 13), here without restarts."""
    mean = hours * 3600
    best = Failures(gpu_hours_between=hours, save_seconds=save).save_interval(num_gpus=1)
    around = [math.expm1((interval + save) / mean) / interval for interval in (best / 2, best, 2 * best)]
    assert around[1] < min(around[0], around[2])


def test_published_throughput_within_eight_percent():
    """From the rates of 8 GPUs and one number of the network, which is fitted to 256 px on 128 GPUs."""
    for side in (256, 512):
        one = A100_RATES[8][side] / 8
        predicted = {n: predict_images_per_second(n, images_per_gpu_second=one, **SD2) for n in A100_RATES}
        assert predicted == {n: pytest.approx(rates[side], rel=0.08) for n, rates in A100_RATES.items()}
        assert predicted[128] / 16 / A100_RATES[8][side] == pytest.approx({256: 0.66, 512: 0.99}[side], abs=0.02)
