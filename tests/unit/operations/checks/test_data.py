"""Checks of streams and caches on real data sets with real faults, and of ranks on recorded readings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diffusion.config.data import Representation, StreamConfig, ValidationConfig
from diffusion.config.loading import load_config
from diffusion.datasets.streams import locate_streams
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.operations.checks.data import (
    CacheDemand,
    CacheProbe,
    check_cache_limit,
    check_cache_space,
    check_stream,
    probe_stream,
)
from diffusion.operations.checks.machine import DiskProbe
from diffusion.operations.checks.ranks import (
    RankProbe,
    Reduction,
    check_config,
    check_reduction,
    check_same_data,
    check_versions,
)
from diffusion.operations.checks.registry import diagnose
from diffusion.operations.checks.verdicts import (
    Level,
    Verdict,
    format_table,
    merge,
    ok,
    problem,
    raise_problems,
    to_json,
    warning,
)
from tests.tools.training_runs import ROOT
from tests.tools.written_data import write_encoded, write_prepared

GB = 10**9
DISK = DiskProbe(folder=Path("/cache"), device=1, free_bytes=200 * GB, is_writable=True)
CACHE = CacheProbe(
    demand=CacheDemand(live_bytes=10 * GB, ahead_bytes=3 * GB, largest_shard=GB // 4, node_bytes=500 * GB),
    limit=None,
    held_bytes=0,
    disks=(DISK,),
    originals=(),
)


def problems_of_stream(root: Path, name: str, *, local: Path | None = None, wants=Representation.latents) -> str:
    remote, place = (None, root) if local is None else (str(root), local)
    (location,) = locate_streams(remote, str(place), [StreamConfig(name=name)])
    verdicts = check_stream(probe_stream(location, 5.0), wants)
    return " ".join(verdict.what for verdict in verdicts if verdict.level is Level.problem)


def test_a_whole_stream_has_no_problem(tmp_path):
    assert problems_of_stream(write_encoded(tmp_path, {"a": 20}), "a") == ""
    assert problems_of_stream(write_prepared(tmp_path / "p", {"a": 8}), "a", wants=Representation.images) == ""


def test_missing_and_damaged_streams(tmp_path):
    root = write_encoded(tmp_path, {"a": 40, "b": 20, "c": 20})
    with pytest.raises(DataError, match=r"\(stream 'x'\) does not exist. Streams there: a, b, c"):
        problems_of_stream(root, "x")
    (root / "a" / "shard.00001.mds").unlink()
    with (root / "a" / "shard.00000.mds").open("ab") as file:
        file.write(b"x")
    assert "shards of" in problems_of_stream(root, "a")
    assert "shard.00000.mds, shard.00001.mds" in problems_of_stream(root, "a")
    index = root / "b" / "index.json"
    index.write_text(index.read_text()[:-20])
    with pytest.raises(DataError, match=r"the index.json of .*/b \(stream 'b'\) is damaged"):
        problems_of_stream(root, "b")
    content = json.loads((root / "c" / "index.json").read_text())
    del content["shards"][0]["samples"]
    (root / "c" / "index.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"KeyError\('samples'\)"):
        problems_of_stream(root, "c")


def test_columns_that_the_configuration_does_not_read(tmp_path):
    images = write_prepared(tmp_path, {"a": 8})
    text = problems_of_stream(images, "a")
    assert "data.representation is latents, which reads latent_mean, token_ids as well" in text


def test_an_index_that_is_not_that_of_the_manifest_or_of_the_cache(tmp_path):
    root, cache = write_prepared(tmp_path / "data", {"a": 8}), tmp_path / "cache"
    (cache / "a").mkdir(parents=True)
    (cache / "a" / "index.json").write_bytes((root / "a" / "index.json").read_bytes())
    assert problems_of_stream(root, "a", local=cache, wants=Representation.images) == ""
    index = root / "a" / "index.json"
    index.write_text(index.read_text() + " ")
    text = problems_of_stream(root, "a", local=cache, wants=Representation.images)
    assert "manifest.json" in text
    assert f"the cache of {root}" in text


@pytest.mark.parametrize(
    ("limit", "without", "level", "text"),
    [
        (None, ["a"], Level.ok, "none"),
        ("100gb", [], Level.ok, "10.0 GB at once"),
        ("11gb", [], Level.warning, "may be deleted before they are read"),
        ("8gb", [], Level.problem, "deleted before they are read, again and again"),
        ("100gb", ["a"], Level.problem, "a has no remote"),
    ],
)
def test_the_limit_of_the_cache(limit, without, level, text):
    (verdict,) = check_cache_limit(replace(CACHE, limit=limit, originals=tuple(without)))
    assert verdict.level is level
    assert text in verdict.what
    if level is Level.problem and not without:
        size = verdict.remedy.split("set it to ")[1].split(" ")[0]
        assert [one.level for one in check_cache_limit(replace(CACHE, limit=size))] == [Level.ok]


def test_the_space_of_the_cache():
    def verdict(**values) -> Verdict:
        (found,) = check_cache_space(replace(CACHE, **values))
        return found

    assert verdict(held_bytes=400 * GB).level is Level.ok
    assert verdict(limit="100gb").level is Level.ok
    assert verdict().level is Level.problem
    assert "500.0 GB are still to be downloaded" in verdict().what
    assert "data.cache_limit" in verdict().remedy
    assert verdict(disks=(replace(DISK, is_writable=False),)).level is Level.problem


RANKS = [RankProbe(rank=i, versions={"torch": "2.7.0"}, data={"a": "1234"}, config="c") for i in range(4)]


def problems_of_ranks(**other) -> str:
    ranks = [*RANKS[:3], replace(RANKS[3], **other)]
    verdicts = [check_versions(ranks), check_config(ranks), check_same_data(ranks)]
    return " ".join(verdict.what for verdict in verdicts if verdict.level is not Level.ok)


def test_ranks_that_differ():
    assert problems_of_ranks() == ""
    assert "torch 2.7.0 on ranks 0, 1, 2, 2.6.0 on rank 3" in problems_of_ranks(versions={"torch": "2.6.0"})
    assert "different data in the a" in problems_of_ranks(data={"a": "9999"})
    assert "unreadable on rank 3" in problems_of_ranks(data={})
    assert "configuration differs" in problems_of_ranks(config="d")


def test_a_wrong_sum():
    good = Reduction(backend="nccl", num_wrong=0, num_bytes=2**22, seconds=0.001)
    assert check_reduction(good).level is Level.ok
    assert "1.0 ms (4.2 GB/s)" in check_reduction(good).what
    verdict = check_reduction(replace(good, num_wrong=7))
    assert verdict.level is Level.problem
    assert "7 of 1,048,576 sums" in verdict.what


def test_verdicts_of_several_machines_as_a_table_and_as_json():
    fine, bad, slow = (
        ok("enough", check="memory"),
        problem("full", "free it", check="disk"),
        warning("slow", "wait", check="disk"),
    )
    merged = merge([("node 0", [fine, slow]), ("node 1", [fine, bad])])
    assert [(verdict.check, verdict.where) for verdict in merged] == [
        ("memory", ""), ("disk", "node 0"), ("disk", "node 1"),
    ]  # fmt: skip
    lines = format_table(merged).splitlines()
    assert lines[0].split() == ["memory", "ok", "enough"]
    assert lines[3].split() == ["disk", "(node", "1)", "problem", "full"]
    assert lines[4].strip() == "-> free it"
    assert to_json(merged)[2] == {
        "check": "disk", "level": "problem", "what": "full", "remedy": "free it", "where": "node 1",
    }  # fmt: skip
    with pytest.raises(MachineError, match=r"^node 1: full: free it$"):
        raise_problems(merged, MachineError)
    raise_problems([fine, slow], MachineError)


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
    (batch,) = [verdict.what for verdict in verdicts if verdict.check == "batch of b"]
    assert batch.startswith("16 samples in ")
    assert "latent_mean 16x4x4x4" in batch


def test_the_faults_of_a_run_are_all_told(tmp_path):
    root = write_encoded(tmp_path, {"a": 40, "b": 24})
    (root / "b" / "index.json").write_text("{")
    problems = of_level(diagnose(toy_config(tmp_path, "data.streams=[{name: a}, {name: b}, {name: c}]")), Level.problem)
    assert [verdict.check for verdict in problems] == ["stream b", "stream c"]


def test_a_damaged_image_file_is_met_by_reading(tmp_path):
    root = write_encoded(tmp_path, {"a": 40, "b": 24})
    shard = root / "a" / "shard.00000.mds"
    shard.write_bytes(b"\xff" * shard.stat().st_size)
    (found,) = of_level(diagnose(toy_config(tmp_path)), Level.problem)
    assert "shard.00000.mds is damaged" in found.what


def test_a_deep_check_finds_damage_that_leaves_a_file_its_size(tmp_path):
    root = write_encoded(tmp_path, {"a": 40})
    (location,) = locate_streams(None, str(root), [StreamConfig(name="a")])
    shard = root / "a" / "shard.00001.mds"
    content = shard.read_bytes()
    assert probe_stream(location, 5.0, deep=True).damaged == ()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert probe_stream(location, 5.0).damaged == ()
    reading = probe_stream(location, 5.0, deep=True)
    assert reading.damaged == (shard.name,)
    assert any(verdict.level is Level.problem for verdict in check_stream(reading, Representation.latents))


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


def test_a_limit_on_originals_and_an_impossible_configuration(tmp_path):
    root = write_encoded(tmp_path, {"a": 40, "b": 24})
    same = [f"data.remote={root}", f"data.local={root}", "data.cache_limit=1gb"]
    (found,) = of_level(diagnose(toy_config(tmp_path, *same)), Level.problem)
    assert found.check == "cache limit"
    assert "the only copy would be deleted" in found.what
    with pytest.raises(ConfigurationError, match=r"data.cache_limit"):
        diagnose(toy_config(tmp_path, "data.cache_limit=1gb"))


def test_held_out_streams_are_checked_too(tmp_path):
    write_encoded(tmp_path, {"a": 40, "b": 24})
    config = toy_config(tmp_path)
    config.validation = ValidationConfig(local=str(tmp_path / "nowhere"))
    problems = of_level(diagnose(config), Level.problem)
    assert {verdict.check for verdict in problems} == {"validation stream a", "validation stream b"}


@pytest.mark.world_size(2)
def test_two_ranks_that_see_different_data(server, tmp_path):
    for rank, size in enumerate((40, 48)):
        write_encoded(tmp_path / f"rank-{rank}", {"a": size})
    # The data set of each rank is a folder of its own, which the two see under one path.
    program = tmp_path / "doctor.py"
    program.write_text(
        "import os, runpy, sys\n"
        f"os.chdir({str(tmp_path)!r} + '/rank-' + os.environ['RANK'])\n"
        f"sys.argv[0] = {str(ROOT / 'scripts' / 'doctor.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    arguments = [
        f"output_folder={tmp_path}/run", "plugins.train_dataset=null", "data.local=train", "data.streams=[{name: a}]",
        "data.num_canonical_nodes=4",
    ]  # fmt: skip
    report = tmp_path / "report.json"
    toy = str(ROOT / "tests/tools/toy.yaml")
    done = server.start(2, [str(program), toy, *arguments, "--json", str(report)]).finish()
    assert any(done.codes), done.output
    verdicts = {verdict["check"]: verdict for verdict in json.loads(report.read_text())}
    assert verdicts["same data"]["level"] == "problem"
    assert "on rank 0" in verdicts["same data"]["what"]
    assert verdicts["versions"]["level"] == verdicts["configuration"]["level"] == "ok"
    assert "the sum is right" in verdicts["all-reduce"]["what"]
    assert "gloo" in verdicts["all-reduce"]["what"]
    assert "Traceback" not in done.output
    assert done.output.count("1 problem") == 1
    assert not any(name.startswith("batch of") for name in verdicts)
