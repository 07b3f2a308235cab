"""Checks of streams and caches on real data sets with real faults."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from diffusion.config.data import Representation, StreamConfig, ValidationConfig
from diffusion.config.loading import load_config
from diffusion.datasets.dataset import TrainingDataset
from diffusion.datasets.encoded import ENCODED, VERSION
from diffusion.datasets.loader import train_loader
from diffusion.datasets.streams import check_separate_caches, locate_streams, located_streams
from diffusion.datasets.transforms import ImageTransform
from diffusion.errors import ConfigurationError, DataError
from diffusion.files import write_json
from diffusion.operations.checks.data import (
    CacheDemand,
    check_cache,
    check_cache_limit,
    check_cache_space,
    check_caches,
    check_data,
    check_files,
    check_identity,
    check_streams,
    find_cache_demand,
    read_stream_files,
    refresh_indexes,
)
from diffusion.operations.checks.doctor import diagnose
from diffusion.operations.checks.machine import SHM
from diffusion.operations.checks.verdicts import Level, Verdict
from tests.tools.training_runs import ROOT
from tests.tools.written_data import (
    PREPARED,
    data_config,
    prepared_sample,
    tokenize,
    write_encoded,
    write_mds,
    write_prepared,
    write_prepared_manifest,
)

GB = 10**9
DEMAND = CacheDemand(live_bytes=10 * GB, ahead_bytes=3 * GB, largest_shard=GB // 4, node_bytes=500 * GB)


def check(root: Path, name: str, *, local: Path | None = None, deep: bool = False) -> None:
    remote, folder = (None, root) if local is None else (str(root), local)
    (location,) = locate_streams(remote, str(folder), [StreamConfig(name=name)])
    check_files(location, 5.0, deep=deep)


def test_missing_and_damaged_streams(tmp_path):
    root = write_encoded(tmp_path, {"a": 40, "b": 20, "c": 20})
    check(root, "a", deep=True)
    with pytest.raises(DataError, match=r"stream .x."):
        check(root, "x")
    with (root / "a" / "shard.00000.mds").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"shard\.00000\.mds"):
        check(root, "a")
    index = root / "b" / "index.json"
    index.write_text(index.read_text()[:-20])
    content = json.loads((root / "c" / "index.json").read_text())
    del content["shards"][0]["samples"]
    (root / "c" / "index.json").write_text(json.dumps(content))
    for name in ("b", "c"):
        with pytest.raises(DataError, match=r"index\.json"):
            check(root, name)


def test_a_deep_check_finds_damage_that_leaves_a_file_its_size(tmp_path):
    root = write_encoded(tmp_path, {"a": 40})
    shard = root / "a" / "shard.00001.mds"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    check(root, "a")
    with pytest.raises(DataError, match=shard.name):
        check(root, "a", deep=True)


def test_an_index_that_is_not_that_of_the_manifest(tmp_path):
    root = write_prepared(tmp_path / "data", {"a": 8})
    check(root, "a")
    index = root / "a" / "index.json"
    index.write_text(index.read_text() + " ")
    with pytest.raises(DataError, match=r"manifest\.json"):
        check(root, "a")


def test_captions_that_may_be_cut_are_counted(tmp_path):
    samples = [prepared_sample("a", i) | {"captions": ["red " * (40 if i < 3 else 4)]} for i in range(8)]
    write_mds(tmp_path / "data" / "train" / "a", PREPARED, samples)
    write_prepared_manifest(tmp_path / "data")
    streams = ["data.streams=[{name: a}]", f"data.local={tmp_path / 'data' / 'train'}", "data.representation=images"]
    verdict = next(one for one in check_data(toy_config(tmp_path, *streams), deep=False) if one.check == "stream a")
    assert "3 of 8 captions take all tokens" in verdict.what


@pytest.mark.parametrize("refresh", [refresh_indexes, lambda config: list(check_data(config, deep=False))])
def test_the_index_of_a_cache_follows_the_data_set(tmp_path, refresh):
    root = write_encoded(tmp_path / "data", {"a": 40})
    cache, folder = tmp_path / "cache", root / "a"
    shutil.copytree(root, cache)
    erased, kept = sorted(path.name for path in (cache / "a").glob("*.mds"))[:2]
    (folder / erased).rename(folder / "renamed.mds")
    (folder / "index.json").write_text((folder / "index.json").read_text().replace(erased, "renamed.mds"))
    (cache / "a" / "notes").touch()
    streams = ["data.streams=[{name: a}]", f"data.remote={root}", f"data.local={cache}"]
    refresh(toy_config(tmp_path, *streams))
    assert (cache / "a" / "index.json").read_bytes() == (folder / "index.json").read_bytes()
    assert not (cache / "a" / erased).exists()
    assert (cache / "a" / kept).exists() and (cache / "a" / "notes").exists()


def test_a_cache_whose_index_is_that_of_the_data_set_is_not_written(tmp_path):
    root, cache = write_encoded(tmp_path / "data", {"a": 8}), tmp_path / "cache"
    streams = ["data.streams=[{name: a}]", f"data.remote={root}", f"data.local={cache}"]
    refresh_indexes(toy_config(tmp_path, *streams))
    assert not cache.exists()
    shutil.copytree(root, cache)
    before = (cache / "a" / "index.json").stat().st_ino
    refresh_indexes(toy_config(tmp_path, *streams))
    assert (cache / "a" / "index.json").stat().st_ino == before


def test_an_original_is_no_cache(tmp_path):
    root, mine = (write_prepared(tmp_path / name, {"a": size}) for name, size in (("one", 8), ("mine", 16)))
    before = {path: path.read_bytes() for path in (mine / "a").iterdir()}
    streams = ["data.streams=[{name: a}]", f"data.remote={root}", f"data.local={mine}"]
    verdicts = list(check_data(toy_config(tmp_path, *streams, "data.representation=images"), deep=False))
    assert [one.level for one in verdicts] == [Level.problem]
    with pytest.raises(ConfigurationError, match=str(mine.parent)):
        train_loader(data_config(mine, "a", remote=str(root)), seed=3, tokenize=tokenize)
    assert {path: path.read_bytes() for path in (mine / "a").iterdir()} == before
    (location,) = locate_streams(f"file://{root}", str(root), [StreamConfig(name="a")])
    assert location.remote is None
    (mine.parent / "manifest.json").unlink()  # As another tool writes it.
    streams[1] = f"data.remote={write_encoded(tmp_path / 'latents', {'a': 8})}"
    with pytest.raises(ConfigurationError, match=str(mine)):
        refresh_indexes(toy_config(tmp_path, *streams))
    assert {path: path.read_bytes() for path in (mine / "a").iterdir()} == before


def test_streams_of_two_sources_have_two_caches(tmp_path):
    config = toy_config(tmp_path, "data.streams=[{name: a}]", "data.remote=s3://b/train", "data.local=/c")
    config.validation = ValidationConfig(remote="s3://b/validation", local="/c")
    with pytest.raises(ConfigurationError, match=r"s3://b/train/a .*s3://b/validation/a"):
        check_streams(config, {})
    config.validation = ValidationConfig(remote="s3://b/train", local="/c")
    check_separate_caches(location for _, location in located_streams(config))


def test_validation_latents_of_another_vae_are_refused_beside_training_data_of_a_plugin(tmp_path):
    local = write_encoded(tmp_path, {"a": 8})
    parts = {"vae": "another", "tokenizer": "it", "empty_ids": [], "source": "", "counts": {}, "precision": "fp32"}
    manifest = {"kind": ENCODED, "version": VERSION, "resolution": 32, "mean_only": False, **parts}
    write_json(tmp_path / "manifest.json", manifest | {"transform": ImageTransform.square(32).identity()})
    validation = f"validation={{local: {local}, streams: [{{name: a}}]}}"
    config = load_config(ROOT / "tests/tools/toy.yaml", [validation])
    identities = {"vae": "another", "tokenizer": "it", "text_encoder": "it"}
    check_identity(config, identities, read_stream_files(config))
    with pytest.raises(DataError, match="VAE: another there, its own here"):
        check_identity(config, identities | {"vae": "its own"}, read_stream_files(config))


@pytest.mark.parametrize(("limit", "level"), [("100gb", Level.ok), ("11gb", Level.warning), ("8gb", Level.problem)])
def test_the_limit_of_the_cache(limit, level):
    verdict = check_cache_limit(DEMAND, limit)
    assert verdict.level is level
    if level is not Level.ok:
        size = verdict.remedy.split("set it to ")[1].split(" ")[0]
        assert check_cache_limit(DEMAND, size).level is Level.ok


def test_the_space_of_the_cache(tmp_path):
    assert check_cache_space(DEMAND, tmp_path, free=200 * GB, missing=100 * GB).level is Level.ok
    verdict = check_cache_space(DEMAND, tmp_path, free=200 * GB, missing=500 * GB)
    assert verdict.level is Level.problem
    assert "data.cache_limit" in verdict.remedy


@pytest.mark.skipif(not SHM.is_dir(), reason="needs a second disk")
@pytest.mark.parametrize(("share", "level"), [(0.6, Level.ok), (0.4, Level.problem)])
def test_a_cache_on_two_disks_needs_the_space_of_both(tmp_path, monkeypatch, share, level):
    root = write_encoded(tmp_path, {"a": 40, "b": 40})
    with TemporaryDirectory(dir=SHM) as second:
        data = data_config(tmp_path / "cache", "a", "b", remote=str(root), representation=Representation.latents)
        data.streams[1].local, data.streams[1].remote = second, str(root / "b")
        dataset = train_loader(data, seed=3, tokenize=None).dataset
        assert isinstance(dataset, TrainingDataset)
        missing = find_cache_demand(dataset, data).node_bytes - dataset.cache_bytes()
        monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=share * missing))
        (verdict,) = check_cache(dataset, data)
        assert verdict.level is level
        dataset.close()


def test_a_cache_limit_below_what_is_needed_at_once_ends_the_start(tmp_path):
    root = write_encoded(tmp_path, {"a": 400, "b": 240})
    remote = {"remote": str(root), "representation": Representation.latents}
    for limit, is_enough in (("40kb", False), ("10mb", True), (None, True)):
        data = data_config(tmp_path / f"cache-{limit}", "a", "b", cache_limit=limit, **remote)
        dataset = train_loader(data, seed=3, tokenize=None).dataset
        config = replace(toy_config(tmp_path), data=data)
        if is_enough:
            check_caches(config, dataset)  # pyright: ignore[reportArgumentType]
        else:
            with pytest.raises(ConfigurationError, match=r"data.cache_limit is 40kb"):
                check_caches(config, dataset)  # pyright: ignore[reportArgumentType]
        dataset.close()  # pyright: ignore[reportAttributeAccessIssue]


def toy_config(root: Path, *overrides: str):
    return load_config(
        ROOT / "tests/tools/toy.yaml",
        [
            f"output_folder={root}/run",
            "plugins.train_dataset=null",
            f"data.local={root}/train",
            "data.streams=[{name: a}, {name: b}]",
            "data.num_canonical_nodes=4",
            "data.download_attempts=1",
            "data.representation=latents",
            *overrides,
        ],
    )


def of_level(verdicts: list[Verdict], *levels: Level) -> list[Verdict]:
    return [verdict for verdict in verdicts if verdict.level in levels]


def test_a_healthy_run_is_found_healthy_and_its_batches_are_read(tmp_path):
    write_encoded(tmp_path, {"a": 40, "b": 24})
    verdicts = diagnose(toy_config(tmp_path))
    assert of_level(verdicts, Level.problem) == []
    (stream,) = [verdict.what for verdict in verdicts if verdict.check == "stream b"]
    assert stream.startswith("24 samples")
    assert "latent_mean 16x4x4x4" in stream


def test_all_faults_of_a_run_are_reported(tmp_path):
    root = write_encoded(tmp_path, {"a": 40, "b": 24})
    (root / "b" / "index.json").write_text("{")
    faults = ["data.streams=[{name: a}, {name: b}, {name: c}]", "plugins.callbacks=[{path: no_module.B}]"]
    problems = of_level(diagnose(toy_config(tmp_path, *faults)), Level.problem)
    assert [verdict.check for verdict in problems] == ["plugins", "stream b", "stream c"]


def test_a_damaged_image_file_is_met_by_reading(tmp_path):
    root = write_encoded(tmp_path, {"a": 40, "b": 24})
    shard = root / "a" / "shard.00000.mds"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    (found,) = of_level(diagnose(toy_config(tmp_path)), Level.problem)
    assert "shard.00000.mds is damaged" in found.what


def test_a_cache_limit_below_the_live_shards_is_a_problem_with_a_limit_that_helps(tmp_path):
    root = write_encoded(tmp_path, {"a": 400, "b": 240})
    remote = [f"data.remote={root}", f"data.local={tmp_path}/cache"]

    def limits(limit: str) -> list[Verdict]:
        verdicts = diagnose(toy_config(tmp_path, *remote, f"data.cache_limit={limit}"))
        return [verdict for verdict in verdicts if verdict.check == "cache limit"]

    (verdict,) = limits("18kb")
    assert verdict.level is Level.problem
    good = verdict.remedy.split("set it to ")[1].split(" ")[0]
    assert limits(good)[0].level is Level.ok


def test_columns_of_another_representation_and_an_impossible_configuration(tmp_path):
    write_prepared(tmp_path, {"a": 40, "b": 24})
    problems = of_level(diagnose(toy_config(tmp_path)), Level.problem)
    assert [verdict.check for verdict in problems] == ["stream a", "stream b"]
    assert "data.representation" in problems[0].what
    with pytest.raises(ConfigurationError, match=r"data.cache_limit"):
        diagnose(toy_config(tmp_path, "data.cache_limit=1gb"))


def test_validation_streams_are_checked_too(tmp_path):
    write_encoded(tmp_path, {"a": 40, "b": 24})
    config = toy_config(tmp_path)
    config.validation = ValidationConfig(local=str(tmp_path / "nowhere"))
    problems = of_level(diagnose(config), Level.problem)
    assert {verdict.check for verdict in problems} == {"validation stream a", "validation stream b"}
