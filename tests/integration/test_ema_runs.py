"""Averages of real training runs, on one and on two ranks, sharded and not, killed and continued."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffusion.checkpointing.find import find_checkpoints
from diffusion.checkpointing.layout import batch_of
from diffusion.checkpointing.read import read_weights
from diffusion.config.model import Weights
from diffusion.ema.averaging import Exponential, PowerFunction, Profile
from diffusion.ema.posthoc import list_averages, read_combination, reconstruct
from diffusion.errors import ConfigurationError, DataError
from diffusion.export import export
from diffusion.formats.run_folder import AVERAGES, read_metrics
from diffusion.loading import load_model
from tests.tools.runs import difference, losses, newest, weights_of
from tests.tools.training_runs import Run

pytestmark = pytest.mark.slow

START, END = 3, 8
DECAYS, WIDTHS = [0.9, 0.5], [0.1, 0.2]
PROFILES: list[Profile] = [*map(Exponential, DECAYS), *map(PowerFunction, WIDTHS)]
POWER = f"{{relative_widths: {WIDTHS}, snapshot_interval: 2ba, snapshot_precision: fp32}}"
KILL = int(signal.SIGKILL)


def averages(start: str = f"{START}ba", decays: list[float] = DECAYS, power: str = POWER) -> str:
    return f"algorithms.ema={{start: {start}, decays: {decays}, power: {power}}}"


def run(folder: Path, parallelism: str, *more: str, plugins: list[str] | None = None) -> Run:
    options = [f"output_folder={folder}", f"trainer.parallelism={parallelism}", "samples.prompts=[]"]
    return "tests/tools/toy.yaml", [*options, averages(), f"plugins.callbacks=[{', '.join(plugins or [])}]", *more]


def validation(shapes: Path) -> list[str]:
    place = f"local: {shapes}/latents-32/validation, streams: [{{name: 32-64}}]"
    return [f"validation={{{place}, device_batch_size: 4}}", "trainer.eval_interval=2ba"]


def plugin(path: str, **arguments: Any) -> str:
    return json.dumps({"path": path, "arguments": arguments})


@pytest.fixture(scope="module")
def runs(server, shapes, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("averages")
    names = ("none", "none-dur", "none-sp", "fsdp-1", "ddp-2", "fsdp-2", "resized", "killed")
    folder = {name: root / name for name in names}

    def recorded(name: str, *more: str) -> Run:
        weights = plugin("tests.tools.toys.RecordWeights", folder=str(folder[name] / "weights"))
        record = plugin("tests.tools.toys.RecordAverages", folder=str(folder[name] / "record"))
        return run(folder[name], "fsdp" if "fsdp" in name else "ddp", *more, plugins=[record, weights])

    short, rarely = "trainer.max_duration=6ba", "trainer.save_interval=4ba"
    kill = plugin("tests.tools.toys.SignalAt", step=7, number=KILL, rank=1)
    server.train(
        2,
        [recorded("ddp-2"), recorded("fsdp-2", *validation(shapes)), run(folder["resized"], "fsdp", short)],
    )
    job = server.run(2, [run(folder["killed"], "fsdp", rarely, plugins=[kill])])
    assert job.codes[1] == -9, job.output[-4000:]
    assert snapshot_steps(folder["killed"]) == [4, 6], "killed after a file that no checkpoint knows of"
    assert [batch_of(path) for path in find_checkpoints(folder["killed"] / "checkpoints")] == [4]
    server.train(2, [run(folder["killed"], "fsdp", rarely)])
    server.train(
        1,
        [
            recorded("none"),
            recorded("fsdp-1"),
            run(folder["none-dur"], "ddp", averages(f"{START / END}dur")),
            run(folder["none-sp"], "ddp", averages(f"{START * 8}sp")),
            run(folder["resized"], "fsdp"),
        ],
    )
    return folder


def snapshot_steps(folder: Path) -> list[int]:
    return sorted({record.step for _, record in list_averages(folder)})


def validation_metrics(folder: Path) -> dict[str, float]:
    """Of the last evaluation."""
    rows = read_metrics(folder / "metrics.jsonl")
    found = ({key: value for key, value in row.items() if key.startswith("metrics/validation/")} for row in rows)
    return [row for row in found if row][-1]


def float64_average(folder: Path, profile: Profile, end: int = END) -> dict[str, Tensor]:
    """The definition, over the weights that were recorded after each step."""
    steps = [torch.load(folder / "weights" / f"step-{step:03d}.pt") for step in range(START, end + 1)]
    average = {name: weight.double() for name, weight in steps[0].items()}
    for t, weights in enumerate(steps[1:], start=2):
        beta = profile.decay if isinstance(profile, Exponential) else (1 - 1 / t) ** (profile.gamma + 1)  # type: ignore
        average = {name: beta * old + (1 - beta) * weights[name].double() for name, old in average.items()}
    return average


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["none", "ddp-2", "fsdp-1", "fsdp-2"])
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.label)
def test_averages_are_the_float64_averages_of_the_recorded_weights(runs, name, profile):
    found = weights_of(runs[name], profile.label)
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    assert difference(found, float64_average(runs[name], profile)) < 1e-6
    weights = torch.load(runs[name] / "weights" / f"step-{END:03d}.pt")
    assert difference(found, {key: weights[key] for key in found}) > 1e-4, "the average is the weights"


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["none", "fsdp-2"])
def test_the_weights_are_stored_beside_their_averages(runs, name):
    """Not the average, which was evaluated just before."""
    weights = torch.load(runs[name] / "weights" / f"step-{END:03d}.pt")
    raw = weights_of(runs[name])
    assert difference(raw, {key: weights[key] for key in raw}) == 0


@pytest.mark.world_size(2)
def test_the_first_average_is_the_one_called_ema(runs):
    for name in ("none", "fsdp-2"):
        assert difference(weights_of(runs[name], Weights.ema), weights_of(runs[name], "decay-0.9")) == 0
        with pytest.raises(DataError, match=r"width-0\.2, but no weights .width-0\.3.: choose raw, decay-0\.9"):
            weights_of(runs[name], "width-0.3")


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("name", "num_ranks"), [("none", 1), ("ddp-2", 2), ("fsdp-1", 1), ("fsdp-2", 2)])
def test_bytes_before_and_after_the_start(runs, name, num_ranks):
    """Nothing before; then 4 bytes per average and per element of the shard that the rank holds."""
    num_weights = sum(tensor.numel() for tensor in weights_of(runs[name]).values())
    elements = []
    for rank in range(num_ranks):
        rows = [json.loads(line) for line in (runs[name] / "record" / f"rank-{rank}.jsonl").open()]
        rows = [row for row in rows if row["event"] == "batch_end"]
        assert [row["step"] for row in rows] == list(range(1, END + 1))
        for row in rows:
            assert row["num_averages"] == (4 if row["step"] >= START else 0)
            assert row["num_bytes"] == 4 * row["num_averages"] * row["num_elements"]
        elements.append(rows[-1]["num_elements"])
    if name.startswith("fsdp"):
        assert sum(elements) == num_weights
        assert num_ranks == 1 or max(elements) < 0.6 * num_weights
    else:
        assert elements == [num_weights] * num_ranks


@pytest.mark.world_size(2)
def test_nothing_is_stored_before_the_start(runs):
    for name in ("none", "fsdp-2"):
        before = find_checkpoints(runs[name] / "checkpoints")[0]
        assert batch_of(before) < START
        with pytest.raises(DataError, match="holds no averages"):
            read_weights(before, "decay-0.9")
        with pytest.raises(DataError, match="it had not started"):
            read_weights(before, Weights.ema)
        assert snapshot_steps(runs[name]) == [4, 6, 8]


@pytest.mark.world_size(2)
def test_the_average_is_evaluated_and_the_weights_are_trained(runs, server, shapes, tmp_path):
    for rank in range(2):
        rows = [json.loads(line) for line in (runs["fsdp-2"] / "record" / f"rank-{rank}.jsonl").open()]
        ends = {row["step"]: row for row in rows if row["event"] == "batch_end"}
        evaluated = {row["step"]: row["weights"] for row in rows if row["event"] == "eval_start"}
        assert sorted(evaluated) == [2, 4, 6, 8]
        assert evaluated[2] == ends[2]["weights"]
        assert all(evaluated[step] == ends[step]["average"] != ends[step]["weights"] for step in (4, 6, 8))
        starts = {row["step"]: row["weights"] for row in rows if row["event"] == "batch_start"}
        assert all(starts[step] == ends[step]["weights"] for step in range(1, END))

    assert losses(runs["fsdp-2"]) == pytest.approx(losses(runs["none"]), rel=1e-5), "training had other weights"

    exported = tmp_path / "exported"
    start = f"init_from={{checkpoint: {newest(runs['fsdp-2'])}, weights: ema}}"
    options = ["algorithms.ema=null", "optimizer.lr=0", "trainer.max_duration=1ba", "schedule.warmup=1ba", start]
    server.train(1, [run(exported, "fsdp", *options, *validation(shapes))])
    expected, found = (validation_metrics(folder) for folder in (exported, runs["fsdp-2"]))
    assert expected
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_start_can_be_given_as_a_fraction_and_in_samples(runs):
    for name in ("none-dur", "none-sp"):
        for profile in PROFILES:
            expected = weights_of(runs["none"], profile.label)
            assert difference(weights_of(runs[name], profile.label), expected) == 0


@pytest.mark.world_size(2)
def test_a_killed_run_leaves_the_same_files(runs):
    def files(name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (runs[name] / AVERAGES).iterdir()}

    assert len(files("fsdp-2")) == 3 * len(WIDTHS)
    assert files("killed") == files("fsdp-2")


@pytest.mark.world_size(2)
@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.label)
def test_averages_continue_at_another_number_of_ranks(runs, profile):
    expected = weights_of(runs["fsdp-2"], profile.label)
    assert difference(weights_of(runs["resized"], profile.label), expected) < 1e-5


@pytest.mark.world_size(5)
def test_averages_continue_where_ranks_have_shards_of_different_sizes(server, tmp_path):
    def steps(folder: Path, num: int) -> Run:
        options = ["data.global_batch_size=15", f"trainer.max_duration={num}ba", "trainer.save_interval=4ba"]
        return run(folder, "fsdp", *options)

    resumed, whole = tmp_path / "resumed", tmp_path / "whole"
    server.train(1, [steps(resumed, 4), steps(whole, END)])
    server.train(5, [steps(resumed, END)])
    for profile in PROFILES:
        expected = weights_of(whole, profile.label)
        assert difference(weights_of(resumed, profile.label), expected) < 1e-5


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["none", "fsdp-2"])
def test_files_hold_the_averages_of_their_steps(runs, name):
    stored = list_averages(runs[name])
    assert [(record.label, record.step, record.time) for _, record in stored] == [
        (f"width-{width}", step, step - START + 1) for step in (4, 6, 8) for width in WIDTHS
    ]
    for path, record in stored:
        found = dict(read_combination([path], [1.0]))
        profile = PowerFunction(float(record.label.partition("-")[2]))
        assert difference(found, float64_average(runs[name], profile, record.step)) < 1e-6
        payload = sum(4 * tensor.numel() for tensor in found.values())
        assert payload < path.stat().st_size < payload + 100_000


@pytest.mark.parametrize("name", ["none", "fsdp-1"])
def test_other_averages_than_those_of_the_checkpoint_are_refused(runs, server, tmp_path, name):
    copy = shutil.copytree(runs[name], tmp_path / "copy")
    job = server.run(1, [run(copy, "fsdp" if "fsdp" in name else "ddp", averages(decays=[0.9, 0.6]))])
    assert job.codes == [2], job.output[-4000:]
    assert "algorithms.ema.decays (was [0.9, 0.5], is [0.9, 0.6])" in job.output
    assert "Traceback" not in job.output


@pytest.mark.world_size(2)
def test_a_file_that_cannot_be_written_ends_the_run_on_all_ranks(server, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / AVERAGES).write_text("in the way")
    job = server.run(2, [run(tmp_path / "run", "fsdp")])
    assert job.codes == [2, 2], job.output[-4000:]
    file = tmp_path / "run" / AVERAGES / "step-000004-width-0.1.safetensors"
    assert job.output.count(f"{file} cannot be written") == 1
    assert "Traceback" not in job.output


def test_a_width_that_was_not_tracked_generates(runs, tmp_path):
    """Two widths at three times; here the reconstructed width is one that can be computed from recorded weights."""
    copy = shutil.copytree(runs["none"], tmp_path / "run")
    path, combination = reconstruct(copy, 0.15)
    assert path == copy / "reconstructed" / "step-000008-width-0.15.safetensors"
    model = load_model(path)
    export(str(path), tmp_path / "exported")
    assert "the average of the weights from step-000008-width-0.15" in (tmp_path / "exported/README.md").read_text()
    expected = float64_average(runs["none"], PowerFunction(0.15))
    found = model.state_dict()
    nearest = float64_average(runs["none"], PowerFunction(0.2))
    assert difference(found, expected) < 0.1 * difference(nearest, expected), combination

    tracked, _ = reconstruct(copy, 0.2, step=6)
    assert difference(load_model(tracked).state_dict(), float64_average(copy, PowerFunction(0.2), 6)) < 1e-6
    loaded = load_model(runs["none"], weights="width-0.2").state_dict()
    assert difference(loaded, weights_of(runs["none"], "width-0.2")) == 0
    with pytest.raises(ConfigurationError, match=r"step 5: .*4, 6, 8"):
        reconstruct(copy, 0.2, step=5)
