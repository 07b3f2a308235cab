"""Bad images of several ranks: counted together, listed once, and the end of the run where there are too many."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composer import Logger, Timestamp

from diffusion.callbacks import guards
from diffusion.callbacks.autoencoder import statistics_images
from diffusion.callbacks.guards import BadImageGuard
from diffusion.config.loading import load_config
from diffusion.datasets.bad_images import BadImage, BadImages
from diffusion.errors import DataError, MachineError
from tests.tools.written_data import write_prepared


def runs(root: Path, folder: Path, steps: int) -> list[tuple[str, list[str]]]:
    overrides = [
        f"output_folder={folder}",
        f"data.local={root}",
        "data.streams=[{name: b}]",
        "data.representation=images",
        "data.num_canonical_nodes=4",
        "data.num_workers=1",
        "plugins.train_dataset=null",
        "algorithms.ema=null",
        "data.resolution=32",
        f"trainer.max_duration={steps}ba",
        "trainer.save_interval=100ba",
        "loggers.utilisation_interval=4",
    ]
    return [("tests/tools/toy.yaml", overrides)]


def test_ranks_count_list_and_end_together(server, tmp_path: Path) -> None:
    few = write_prepared(tmp_path / "few", {"b": 64}, bad=(3, 20, 41))
    server.train(2, runs(few, tmp_path / "run", 8))
    lines = (tmp_path / "run" / "bad_images.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert {json.loads(line)["key"] for line in lines} == {"b/3", "b/20", "b/41"}
    # Each of two ranks meets fewer than eleven in an epoch, both together more.
    many = write_prepared(tmp_path / "many", {"b": 64}, bad=tuple(range(0, 64, 4)))
    job = server.run(2, runs(many, tmp_path / "ended", 8))
    assert job.codes == [2, 2], job.output[-3000:]
    assert job.output.count("images cannot be decoded") == 1
    assert len((tmp_path / "ended" / "bad_images.jsonl").read_text().splitlines()) >= 11


def test_each_bad_image_counts_once_in_a_run(server, tmp_path: Path) -> None:
    few = write_prepared(tmp_path / "few", {"b": 64}, bad=tuple(range(10)))
    folder = tmp_path / "run"
    # Two epochs in each of two starts: 40 encounters.
    server.train(1, [*runs(few, folder, 16), *runs(few, folder, 32)])
    assert len((folder / "bad_images.jsonl").read_text().splitlines()) == 10


def test_the_list_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(guards, "read_bad_images", lambda path: reads.append(path) or [])
    images = BadImages()
    guard = BadImageGuard(tmp_path, 1, SimpleNamespace(bad_images=images, num_samples=100))  # pyright: ignore[reportArgumentType]
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=1, sample=100))
    guard.close(state, Logger(state))
    assert not reads
    for index in (3, 4, 3):
        images.count_bad(BadImage(stream="b", index=index, key="", epoch=0, error=""))
        guard.batch_end(state, Logger(state))
    assert len(reads) == 1
    assert len((tmp_path / "bad_images.jsonl").read_text().splitlines()) == 2


def test_a_list_that_cannot_be_written_is_one_message(tmp_path: Path) -> None:
    data: Any = SimpleNamespace(bad_images=BadImages(), num_samples=100)
    data.bad_images.count_bad(BadImage(stream="b", index=3, key="", epoch=0, error=""))
    state: Any = SimpleNamespace(timestamp=Timestamp(batch=1, sample=100))
    with pytest.raises(MachineError, match=r"bad_images\.jsonl cannot be written"):
        BadImageGuard(tmp_path / "gone", 1, data).close(state, Logger(state))


def test_a_start_continues_the_counts_of_earlier_ones(tmp_path: Path) -> None:
    found = [BadImage(stream="b", index=index, key="", epoch=0, error="") for index in range(61)]
    for sample in (60_000, 50_000):  # The second start repeats steps.
        data: Any = SimpleNamespace(bad_images=BadImages(num_ranks=2), num_samples=100_000)
        state: Any = SimpleNamespace(timestamp=Timestamp(batch=sample // 100, sample=sample))
        guard = BadImageGuard(tmp_path, 1, data)
        guard.fit_start(state, Logger(state))
        for image in found[: sample // 1000]:
            data.bad_images.count_bad(image)
        guard.batch_end(state, Logger(state))
    with pytest.raises(DataError, match="51 of 25000 images"):
        data.bad_images.count_bad(found[-1])
    guard.close(state, Logger(state))
    assert len((tmp_path / "bad_images.jsonl").read_text().splitlines()) == 61


def test_statistics_of_the_latents_are_not_ended_by_bad_images(tmp_path: Path) -> None:
    """A run of 100,000 images, trained to its end, may have all of its bad ones among those of the statistics."""
    root = write_prepared(tmp_path, {"b": 64}, bad=tuple(range(0, 64, 4)))
    overrides = [f"data.local={root}", "data.streams=[{name: b}]", f"validation.local={root}"]
    images = list(statistics_images(load_config("yamls/tiny/autoencoder.yaml", overrides)))
    assert sum(map(len, images)) == 64


def test_a_run_that_a_loader_worker_ends_lists_what_it_met(server, tmp_path: Path) -> None:
    root = write_prepared(tmp_path / "many", {"b": 64}, bad=tuple(range(0, 64, 2)))
    ((yaml, overrides),) = runs(root, tmp_path / "run", 8)
    job = server.run(2, [(yaml, [*overrides, "loggers.utilisation_interval=1000"])])
    assert 2 in job.codes and 0 not in job.codes, job.output[-3000:]
    lines = (tmp_path / "run" / "bad_images.jsonl").read_text().splitlines()
    assert len({json.loads(line)["index"] for line in lines}) >= 11
