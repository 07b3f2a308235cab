"""Which images a run has seen, where some of those that were drawn could not be used."""

import csv
import json
import tracemalloc
from pathlib import Path

import numpy as np

from diffusion.config.loading import load_config
from diffusion.datasets.bad_images import BadImage
from diffusion.datasets.provenance import apply_substitutes, times_seen
from diffusion.datasets.sample_order import GlobalOrder, OrderSettings, StreamShape
from tests.integration.test_bad_images_in_runs import runs
from tests.integration.test_failures import SMALL
from tests.tools.written_data import write_encoded, write_prepared


def test_substitutes_are_counted_instead_of_what_could_not_be_encoded_or_decoded(tmp_path: Path) -> None:
    prepared = write_prepared(tmp_path / "prepared", {"a": 8})
    latents = write_encoded(tmp_path / "latents", {"a": 8})
    (tmp_path / "prepared" / "withdrawn.json").write_text(json.dumps({"train/a": [2]}))
    (tmp_path / "latents" / "damaged.json").write_text(json.dumps({"train/a": [1]}))
    overrides = [f"data.local={latents}", "data.streams=[{name: a}]", "model.vae=none", "output_folder=none"]
    config = load_config("yamls/tiny/phase1.yaml", [*SMALL, *overrides])
    counts = [np.array([1, 2, 3, 4, 5, 6, 7, 8], np.int32)]
    bad = [BadImage(stream=stream, index=7, key="", epoch=0, error="") for stream in ("a", "other")]
    apply_substitutes(config, [prepared / "a"], counts, bad)
    assert counts[0].tolist() == [9, 0, 0, 9, 5, 6, 7, 0]


def test_a_few_steps_of_a_large_stream_take_no_memory_but_the_counts() -> None:
    shards = np.full(1000, 10_000, np.int64)
    stream = StreamShape(name="a", samples_per_shard=shards, draws=int(shards.sum()))
    order = GlobalOrder([stream], OrderSettings(seed=3, global_batch_size=128, num_canonical_nodes=128))
    tracemalloc.start()
    (counts,) = times_seen(order, 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts.sum() == 1280 and counts.max() == 1
    assert peak < 1.5 * counts.nbytes


def test_the_command_lists_what_a_run_of_bad_images_has_seen(server, tmp_path: Path) -> None:
    root = write_prepared(tmp_path / "data", {"b": 64}, bad=(3, 4, 63))
    ((yaml, overrides),) = runs(root, tmp_path / "run", 8)
    server.train(1, [(yaml, overrides)])
    out = tmp_path / "seen.csv"
    server.command(0, ["scripts/provenance.py", str(tmp_path / "run"), "--out", str(out)])
    times = {int(row["index"]): int(row["times"]) for row in csv.DictReader(out.open())}
    assert sum(times.values()) == 64
    assert times == {index: 1 for index in range(64) if index not in (3, 4, 63)} | {0: 2, 5: 3}
