"""What breaks around a run: ranks that are killed, data that vanishes, jobs side by side."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from composer import Callback, Logger, State
from composer.utils import dist

from diffusion.callbacks.monitoring import Heartbeat
from diffusion.config.loading import load_config
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.operations.checks.data import check_streams, read_stream_files
from diffusion.operations.lease import leased
from diffusion.train import build_train_data
from tests.tools.runs import losses
from tests.tools.training_runs import SMALL_UNET

pytestmark = pytest.mark.slow

SMALL = [
    SMALL_UNET,
    "trainer.save_interval=100ba",
    "trainer.progress_bar=false",
    "schedule.warmup=2ba",
    "samples.prompts=[]",
    "data.global_batch_size=16",
    "data.streams=[{name: 32-64}, {name: 64-up}]",
    "validation=null",
]


class RemoveAt(Callback):
    """Remove a folder on rank 0 when all ranks have begun a step; they continue after it.

    Loader workers have read all that they were asked for: the next read fails in the same step on all ranks.
    """

    def __init__(self, step: int, folder: str) -> None:
        self.step, self.folder = step, folder

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step:
            iterator: Any = getattr(state.train_dataloader, "_iterator", None)
            while iterator is not None and iterator._data_queue.qsize() < iterator._tasks_outstanding:
                time.sleep(0.01)
            dist.barrier()
            if dist.get_global_rank() == 0:
                shutil.rmtree(self.folder)
            dist.barrier()


class AskAlone(Callback):
    """Ask all callbacks for their state when a step begins, on rank 1 only."""

    def __init__(self, step: int) -> None:
        self.step = step

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == self.step and dist.get_global_rank() == 1:
            for callback in state.callbacks:
                callback.state_dict()


def latents(shapes: Path, data: Path, folder: Path, *overrides: str) -> tuple[str, list[str]]:
    places = [f"output_folder={folder}", f"data.local={data}/train", f"model.vae={shapes}/vae"]
    return "yamls/tiny/phase1.yaml", [*SMALL, *places, *overrides]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(("file", "end"), [("shard.00000.mds", b"\xff" * 9), ("index.json", b"")])
def test_a_file_damaged_on_one_node_ends_all_ranks_and_is_reported_there(server, shapes, tmp_path, file, end):
    for node in range(2):
        shutil.copytree(shapes / "latents-32", tmp_path / str(node))
    damaged = tmp_path / "1" / "train" / "32-64" / file
    damaged.write_bytes(damaged.read_bytes()[:-9] + end)
    yaml, overrides = latents(shapes, tmp_path / "{node}", tmp_path / "run", "trainer.dist_timeout=600")
    job = server.start(2, ["tests/tools/ranks_as_nodes.py", "1", yaml, *overrides]).finish(timeout=500)
    # In the middle of a run, the node with the damage reports it; the collective of the other one fails.
    assert job.codes[1] == 2 and job.codes[0] != 0, job.output
    assert "rank 1: DataError: " in job.output
    assert str(damaged) in job.output


@pytest.mark.world_size(2)
@pytest.mark.parametrize("is_cache", [False, True])
def test_nodes_with_other_versions_of_the_data_train_on_one_or_end(server, shapes, tmp_path, is_cache):
    for node in range(2):
        shutil.copytree(shapes / "latents-32", tmp_path / str(node))
    if is_cache:  # With a manifest it would be an original, and no cache.
        (tmp_path / "1" / "manifest.json").unlink()
    index = tmp_path / "1" / "train" / "32-64" / "index.json"
    content = json.loads(index.read_text())
    content["shards"][-1]["samples"] -= 1
    index.write_text(json.dumps(content))
    remote = f"data.remote={tmp_path}/0/train"
    more = [remote, f"data.local={tmp_path}/{{node}}/train"] if is_cache else []
    more += ["trainer.max_duration=2ba", "trainer.dist_timeout=60"]
    yaml, overrides = latents(shapes, tmp_path / "{node}", tmp_path / "run", *more)
    job = server.start(2, ["tests/tools/ranks_as_nodes.py", "1", yaml, *overrides]).finish()
    if is_cache:
        assert job.codes == [0, 0], job.output[-6000:]
        assert index.read_bytes() == (tmp_path / "0/train/32-64/index.json").read_bytes()
    else:
        assert job.codes == [2, 2], job.output[-6000:]
        assert "DataError: rank 1 of 2: the shards of data.streams are not those of rank 0" in job.output


@pytest.mark.world_size(2)
def test_ranks_with_other_settings_end(server, tmp_path):
    overrides = [f"output_folder={tmp_path}/{{node}}", "optimizer.lr=1.{node}e-3", "trainer.max_duration=9{node}ba"]
    program = ["tests/tools/ranks_as_nodes.py", "1", "tests/tools/toy.yaml", *overrides]
    job = server.start(2, [*program, f"operations.heartbeat_folder={tmp_path}/{{node}}"])
    assert job.finish().codes == [2, 2], job.output[-6000:]
    assert (
        "rank 1 of 2: the configuration differs from that of rank 0 in optimizer.lr, trainer.max_duration."
        in job.output
    )


@pytest.mark.world_size(2)
def test_one_rank_alone_may_ask_for_the_state_of_callbacks(server, shapes, tmp_path):
    ask = "plugins.callbacks=[{path: tests.integration.test_failures.AskAlone, arguments: {step: 3}}]"
    ema = "algorithms.ema={start: 1ba, decays: [0.9]}"
    options = [ask, ema, "trainer.max_duration=5ba", "trainer.dist_timeout=60"]
    server.train(2, [latents(shapes, shapes / "latents-32", tmp_path / "run", *options)])
    assert len(losses(tmp_path / "run")) == 5


@pytest.mark.world_size(2)
def test_data_that_vanishes_in_mid_run_ends_all_ranks_with_one_message(server, shapes, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(shapes / "latents-32", data)
    arguments = f"{{step: 2, folder: {data}/train/32-64}}"
    remove = f"plugins.callbacks=[{{path: tests.integration.test_failures.RemoveAt, arguments: {arguments}}}]"
    options = [remove, "data.num_workers=1", "trainer.max_duration=100ba"]
    job = server.run(2, [latents(shapes, data, tmp_path / "run", *options)])
    assert job.codes == [2, 2], job.output[-4000:]
    assert job.output.count("DataError: ") == 1, job.output[-4000:]
    assert str(data / "train" / "32-64") in job.output
    assert "Traceback" not in job.output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.streams=[{name: 32-64}, {name: 64-128}]", "set data.streams='[{name: 32-64}, {name: 64-up}]'"),
        ("validation={local: /nowhere}", "correct validation.local"),
        ("data.remote=file:///nowhere", "/nowhere"),
    ],
)
def test_data_that_is_not_there_is_named(shapes, tmp_path, override, message):
    config = load_config(*latents(shapes, shapes / "latents-32", tmp_path / "run", override))
    with pytest.raises(DataError, match=re.escape(message)):
        check_streams(config, read_stream_files(config))


@pytest.mark.world_size(2)
def test_data_that_is_not_there_ends_all_ranks_with_one_message(server, shapes, tmp_path):
    """Before networks are built: the VAE is not there, either, and nobody has looked."""
    missing = [f"data.local={tmp_path}/nowhere/train", f"model.vae={tmp_path}/no-vae"]
    job = server.run(2, [latents(shapes, shapes / "latents-32", tmp_path / "run", *missing)])
    assert job.codes == [2, 2]
    assert job.output.count("DataError: ") == 1
    assert f"{tmp_path}/nowhere/train" in job.output
    assert "Traceback" not in job.output
    assert "no-vae" not in job.output


@pytest.mark.parametrize("place", ["empty", "nowhere"])
def test_a_start_that_is_not_there_is_told_with_its_key_before_networks_are_built(server, tmp_path, place):
    (tmp_path / "empty").mkdir()
    places = [f"init_from.checkpoint={tmp_path / place}", f"model.vae={tmp_path}/no-vae"]
    job = server.run(1, [("tests/tools/toy.yaml", [f"output_folder={tmp_path}/run", *places])])
    assert job.codes == [2]
    what = "holds no complete checkpoint" if place == "empty" else "does not exist"
    assert f"ConfigurationError: init_from.checkpoint: {tmp_path / place} {what}" in job.output


@pytest.mark.world_size(2)
def test_two_jobs_on_one_machine_train_as_if_alone(server, shapes, tmp_path):
    """Both at once, and each beginning anew while the other may still be running."""
    data, num_steps = shapes / "latents-32", 8

    def job(name: str, seed: int) -> tuple[str, list[str]]:
        options = [f"seed={seed}", f"trainer.max_duration={num_steps}ba", "data.num_workers=1"]
        return latents(shapes, data, tmp_path / name, *options)

    server.train(2, [job("alone-1", 1), job("alone-2", 2)])
    both = [server.start_training(2, [job(f"beside-{seed}", seed), job(f"again-{seed}", seed)]) for seed in (1, 2)]
    for ended in [one.finish() for one in both]:
        assert ended.codes == [0, 0], ended.output[-4000:]
    for seed in (1, 2):
        assert losses(tmp_path / f"beside-{seed}") == losses(tmp_path / f"alone-{seed}")
        assert losses(tmp_path / f"again-{seed}") == losses(tmp_path / f"alone-{seed}")
        assert len(losses(tmp_path / f"alone-{seed}")) == num_steps


def test_a_data_set_of_the_users_own_that_is_less_than_a_step_is_refused():
    config = load_config("tests/tools/toy.yaml", ["plugins.train_dataset.arguments={num_samples: 7}"])
    with pytest.raises(ConfigurationError, match=r"plugins\.train_dataset .*data\.global_batch_size"):
        build_train_data(config)
    config = load_config("tests/tools/toy.yaml", ["plugins.train_dataset.arguments={num_samples: 8}"])
    assert len(list(build_train_data(config).dataloader)) == 1
    config.data.num_workers, config.data.prefetch_factor, config.data.loader_timeout = 1, 3, 7.0
    loader: Any = build_train_data(config).dataloader
    assert (loader.num_workers, loader.prefetch_factor, loader.timeout) == (1, 3, 7.0)


def test_a_folder_for_signs_of_life_that_cannot_be_written_is_named(tmp_path):
    folder, not_written = (
        Path("/dev/null/beats"),
        pytest.raises(MachineError, match="/dev/null/beats"),
    )
    with not_written, leased(tmp_path) as lease, Heartbeat(folder, lease):
        pass
