"""Which images a run has seen, where some of those that were drawn could not be used."""

import csv
import datetime
import json
import re
import runpy
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diffusion.config.loading import load_config
from diffusion.datasets.bad_images import BadImage
from diffusion.datasets.provenance import Exposure, apply_substitutes, build_order, exposures, times_seen
from diffusion.datasets.sample_order import GlobalOrder, OrderSettings, StreamShape
from diffusion.errors import DataError
from diffusion.formats.data_set import PreparedManifest, RejectedEntry, SourceEntry
from diffusion.formats.shards import read_index
from diffusion.operations.training_content import Content, size_range, write_summary
from tests.integration.test_bad_images_in_runs import runs
from tests.integration.test_failures import SMALL
from tests.tools.image_files import write_folder
from tests.tools.preparing import prepare
from tests.tools.training_runs import ROOT
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


def test_the_order_of_a_run_on_data_that_has_grown_since(tmp_path: Path) -> None:
    options = {"edges": [16, 34], "shard_bytes": 8000, "window_bytes": 9000, "partition_size": 3}
    root, overrides = tmp_path / "data", ["data.streams=[{name: 16-34}, {name: 34-up}]", "data.global_batch_size=4"]
    config = load_config("yamls/tiny/phase1.yaml", [*SMALL, *overrides, f"data.local={root}/train"])
    orders, folders = [], [root / "train" / name for name in ("16-34", "34-up")]
    for start in (0, 30, 50):
        write_folder(tmp_path / "set", 20, start=start)
        prepare([tmp_path / "set"], root, **options)
        orders.append(build_order(config, folders, {}))
    assert len({order.fingerprint()["shards of data.streams"] for order in orders}) == 3
    assert build_order(config, folders, {}).fingerprint() == orders[2].fingerprint()
    last = read_index(folders[0]).num_samples - 1
    (root / "withdrawn.json").write_text(json.dumps({"train/16-34": [0, last]}))
    for number, order in enumerate(orders):
        found = build_order(config, folders, order.fingerprint())
        assert found.fingerprint() == order.fingerprint()
        counts = [np.ones(stream.num_samples, np.int32) for stream in found.streams]
        apply_substitutes(config, folders, counts)
        assert sum(count.sum() for count in counts) == (20, 40, 60)[number]
        assert len(list(exposures(config, folders, counts))) == (19, 39, 58)[number]


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


def test_the_command_lists_what_a_run_of_bad_images_has_seen(server, tmp_path: Path, monkeypatch, capsys) -> None:
    licences = iter(["CC0\nforged 5\x1b[31m"])
    monkeypatch.setattr("diffusion.operations.training_content.licence_of", lambda metadata: next(licences, ""))
    root = write_prepared(tmp_path / "data", {"b": 64}, bad=(3, 4, 63))
    ((yaml, overrides),) = runs(root, tmp_path / "run", 8)
    server.train(1, [(yaml, overrides)])
    out, summary = tmp_path / "seen.csv", tmp_path / "summary.md"
    options = [str(tmp_path / "run"), "--out", str(out), "--summary", str(summary)]
    monkeypatch.setattr(sys, "argv", ["provenance.py", *options])
    runpy.run_path(str(ROOT / "scripts" / "provenance.py"))["main"]()
    times = {int(row["index"]): int(row["times"]) for row in csv.DictReader(out.open())}
    assert sum(times.values()) == 64
    assert times == {index: 1 for index in range(64) if index not in (3, 4, 63)} | {0: 2, 5: 3}
    text = summary.read_text()
    assert "| b |  |  | 0 | 0 | 61 | 64 |" in text
    assert "| (none given) | 60 |" in text
    output = capsys.readouterr().out
    assert "\nCC0\\nforged 5\\x1b[31m" in output and output.replace("\n", "").isprintable()
    assert f"before the run began on {datetime.datetime.now(datetime.UTC):%Y}" in text
    for file in (out, summary):
        file.unlink()
    (root.parent / "manifest.json").write_text('{"kind": "encoded"}')
    with pytest.raises(DataError, match="--data"):
        runpy.run_path(str(ROOT / "scripts" / "provenance.py"))["main"]()
    assert not out.exists() and not summary.exists()


def test_a_summary_has_sources_domains_rejections_and_takedowns(tmp_path: Path, monkeypatch) -> None:
    folder = write_prepared(tmp_path / "data", {"a": 4}) / "a"
    source = SourceEntry(name="web", kind="parquet", path="s3://bucket/web", seen=1500, kept=4)
    rejected = {"too_small": RejectedEntry(count=1496, examples=[])}
    replace(PreparedManifest.read(tmp_path / "data"), sources=[source], rejected=rejected).write(tmp_path / "data")
    (tmp_path / "data" / "withdrawn.json").write_text(json.dumps({"train/a": [1, 3], "validation/a": [0]}))
    content = Content()
    hosts = ["www.first.org", *(f"host{i}.org" for i in reversed(range(14)))]
    for i in range(20):
        url = f"https://{hosts[max(0, i - 5)]}/{i}.jpg"
        metadata = {"license": "CC BY | 4.0\n<b>\x1b", "url": url} if i else {"URL": "https://[no address"}
        content.add(Exposure(stream="a", index=i, times=2, key=f"web/{i}", metadata=metadata))
    for address in ("s3://bucket.org/1.jpg", "shapes://red.org", "host.org/1.jpg"):
        content.add(Exposure(stream="a", index=0, times=1, key="store/1", metadata={"url": address}))
    monkeypatch.setattr("diffusion.operations.training_content.read_identities", lambda _: {"text_encoder": "0123"})
    config = load_config("yamls/tiny/phase1.yaml", [*SMALL, f"data.local={folder.parent}", "model.vae=some/vae"])
    options = {"config": config, "checkpoint": Path("ep0-ba8"), "num_steps": 8, "folders": [folder], "runs": []}
    write_summary(tmp_path / "summary.md", content, **options)
    text = (tmp_path / "summary.md").read_text()
    assert "| web | parquet | s3://bucket/web | 1,500 | 4 | 20 | 40 |" in text
    assert "| CC BY \\| 4.0 &lt;b>\\\\x1b | 19 |" in text
    assert re.findall(r"\| (.*\.org) \| (\d+) \|", text) == [("first.org", "5"), ("host0.org", "1")]
    assert "| too_small | 1,496 |" in text
    assert "taken down from the data set: 2." in text
    assert "`model.vae`: some/vae; text encoder with hash 0123" in text


def test_the_ranges_of_sizes_are_those_of_the_template() -> None:
    ranges = [size_range(number) for number in (10**6 - 1, 10**6, 10**9, 10**9 + 1)]
    middle = "1 million to 1 billion images"
    assert ranges == ["less than 1 million images", middle, middle, "more than 1 billion images"]
