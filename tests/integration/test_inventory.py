"""What is stored below folders and in a real object store, what it costs, and which checkpoints are removed there."""

import hashlib
import json
import time
from pathlib import Path

import pytest
import torch

from diffusion import storage
from diffusion.checkpointing.find import resolve_checkpoint
from diffusion.checkpointing.remote import RemoteCheckpoints
from diffusion.checkpointing.save import write_file
from diffusion.errors import ConfigurationError
from diffusion.formats.run_folder import LEASE, read_config
from diffusion.operations.costs import Activity, CostsFile, StartCosts
from diffusion.operations.inventory import Item, ItemKind, assign_users, find_items, read_uses, stored_bytes
from scripts import runs as runs_command
from tests.tools.s3_server import S3Server, s3_process, s3_server
from tests.unit.operations.test_runs import hold, write_run

__all__ = ["s3_process", "s3_server"]

MONTH = 365.25 / 12 * 86400
STREAMS = "data.streams=[{name: 32-64}]"
NO_PLUGIN = "plugins.train_dataset=null"


def write_data(root: str) -> dict[str, int]:
    """Prepared and encoded data below a root; the bytes of each."""
    prepared = json.dumps({"kind": "prepared", "version": 2}).encode()
    source = hashlib.sha256(prepared).hexdigest()
    encoded = json.dumps({"kind": "encoded", "source": source}).encode()
    files = {
        "prepared/train/32-64/shard.00000.mds": b"x" * 70_000,
        "prepared/metadata/part-0.parquet": b"x" * 5_000,
        "prepared/scan.json": b"{}",
        "prepared/manifest.json": prepared,
        "latents/train/32-64/shard.00000.mds": b"x" * 30_000,
        "latents/train/32-64/index.json": b"{}",
        "latents/manifest.json": encoded,
        "began/work.partial/parts/0.json": b"x" * 300,
        "website/manifest.json": b"[]",
        "notes.txt": b"x" * 11,
    }
    for name, content in files.items():
        storage.write(storage.join(root, name), content)
    sizes: dict[str, int] = {}
    for name, content in files.items():
        top = name.partition("/")[0]
        top = top if top in ("prepared", "latents", "began") else ""
        sizes[top] = sizes.get(top, 0) + len(content)
    return sizes


def write_checkpoints(folder: Path, uri: str, steps: tuple[int, ...]) -> None:
    for step in steps:
        write_file(folder / f"ep0-ba{step}.pt", {"state": {"x": torch.zeros(step)}})
        storage.upload(folder / f"ep0-ba{step}.pt", f"{uri}/ep0-ba{step}.pt")


@pytest.mark.s3
@pytest.mark.parametrize("place", ["folder", "store"])
def test_each_file_belongs_to_one_item_and_each_item_has_its_users(place, s3_server: S3Server, tmp_path: Path) -> None:
    root = str(tmp_path / "data") if place == "folder" else "s3://tests/inventory"
    sizes = write_data(root)
    (tmp_path / "checkpoint").mkdir()
    write_checkpoint = tmp_path / "checkpoint/ep0-ba2.pt"
    write_file(write_checkpoint, {"state": {"x": torch.zeros(8)}})
    for name in ("a/ep0-ba2.pt", "a/averages/one.safetensors", "b/ep0-ba4/.metadata", "b/ep0-ba4/__0_0.distcp"):
        storage.write(storage.join(root, "checkpoints", name), write_checkpoint.read_bytes())
    size = write_checkpoint.stat().st_size
    sizes |= {"checkpoints/a": 2 * size, "checkpoints/b": 2 * size}

    cache = tmp_path / "cache/train"
    (cache / "32-64/.locks").mkdir(parents=True)
    (cache / "32-64/.locks/shard.00000.mds").write_bytes(b"12")
    (cache / "32-64/shard.00000.mds").write_bytes(b"x" * 30_000)

    first = write_run(
        tmp_path / "runs/first", NO_PLUGIN, STREAMS, f"data.local={cache}",
        f"data.remote={root}/latents/train", f"trainer.checkpoint_folder={root}/checkpoints/a",
    )  # fmt: skip
    second = write_run(tmp_path / "runs/second", f"init_from.checkpoint={root}/checkpoints/a/ep0-ba2.pt")
    uses = {"first": read_uses(tmp_path / "runs/first", first), "second": read_uses(tmp_path / "runs/second", second)}
    items = [*find_items(root), *find_items(str(tmp_path / "cache"))]
    assign_users(items, uses)
    found = {item.uri.removeprefix(root).strip("/"): item for item in items}
    assert {name: found[name].num_bytes for name in sizes} == sizes
    assert found[str(cache).strip("/")].num_bytes == 30_002
    assert {name: (item.kind, item.users) for name, item in found.items()} == {
        "": (ItemKind.other, []),
        "prepared": (ItemKind.prepared, [f"{root}/latents"]),
        "latents": (ItemKind.encoded, ["first"]),
        "began": (ItemKind.unfinished, []),
        "checkpoints/a": (ItemKind.checkpoints, ["first", "second"]),
        "checkpoints/b": (ItemKind.checkpoints, []),
        str(cache).strip("/"): (ItemKind.cache, ["first"]),
    }
    newest = max(file.time or 0 for file in storage.list_files(f"{root}/latents").values())
    assert found["latents"].written == newest > 0
    with pytest.raises(ConfigurationError):
        find_items(f"{root}/absent")


def test_hundreds_of_items_and_runs_are_compared_in_seconds(tmp_path: Path) -> None:
    items = [Item(uri=f"{tmp_path}/{number}", kind=ItemKind.prepared) for number in range(300)]
    began = time.process_time()
    assign_users(items, {str(number): [f"{tmp_path}/{number}/train", "s3://b/x"] for number in range(300)})
    assert time.process_time() - began < 5
    assert [item.users for item in items] == [[str(number)] for number in range(300)]


@pytest.mark.s3
def test_dollars_a_month_and_users_are_listed(s3_server: S3Server, tmp_path: Path, capsys) -> None:
    storage.write("s3://tests/listed/checkpoints/ep0-ba1.pt", b"x" * 25_000_000)
    run = tmp_path / "run"
    write_run(run, "trainer.checkpoint_folder=s3://tests/listed/checkpoints")
    result = {"path": f"{run}/ep0-ba1.pt", "name": "ep0-ba1", "numbers": {}, "protocols": {}}
    (tmp_path / "judged/results").mkdir(parents=True)
    (tmp_path / "judged/results/ep0-ba1.json").write_text(json.dumps(result))
    runs_command.show_inventory(["s3://tests/listed"], [tmp_path], 20_000.0)
    row, total = capsys.readouterr().out.splitlines()[-2:]
    assert row.split("  ")[0] == "s3://tests/listed/checkpoints"
    for cell in ("checkpoints", "25.0 MB", "0.50", "0.0", f"{run}, evaluation {tmp_path}/judged"):
        assert f"  {cell}" in row
    assert total.split() == ["sum", "1", "25.0", "MB", "0.50"]


@pytest.mark.s3
def test_what_a_run_has_cost_with_its_data_and_checkpoints_in_a_store(s3_server, tmp_path, capsys) -> None:
    storage.write("s3://tests/paid/train/32-64/shard.00000.mds", b"x" * 6_000_000)
    storage.write("s3://tests/paid/checkpoints/ep0-ba2.pt", b"x" * 4_000_000)
    run = tmp_path / "run"
    write_run(
        run, NO_PLUGIN, STREAMS, f"data.local={tmp_path / 'cache'}", "data.remote=s3://tests/paid/train",
        "trainer.checkpoint_folder=s3://tests/paid/checkpoints", "operations.max_dollars=60",
    )  # fmt: skip
    seconds = {kind.value: 0.0 for kind in Activity} | {"training": 7200.0}
    file = CostsFile(run)
    file.write(
        StartCosts(
            began=0, ended=MONTH / 2, num_devices=4, price=2.5, step=0, reached=2, fetched_bytes=3_000_000,
            seconds=seconds,
        )
    )  # fmt: skip
    file.close()
    runs_command.show_costs(run, gpu_price=None, storage_price=200_000.0, egress_price=1_000_000.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-2:] for line in lines[2:6]] == [
        ["20.00", "80.00"],  # 8 GPU-hours
        ["1.00", "4.00"],  # 10 MB for half a month
        ["3.00", "12.00"],
        ["24.00", "96.00"],
    ]
    assert "$80.00 of $60.00" in lines[6], "the limit counts GPU time"
    assert lines[6].endswith("step 6")


def test_averages_are_stored_beside_the_checkpoints(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_run(run)
    for name in ("checkpoints/ep0-ba2.pt", "averages/step-000002-width-0.1.safetensors"):
        storage.write(str(run / name), bytes(1000))
    assert stored_bytes(run, read_config(run))[0] == 2000


@pytest.mark.s3
def test_checkpoints_in_a_store_go_with_yes_only_and_never_those_that_are_needed(
    s3_server: S3Server, tmp_path: Path, monkeypatch, capsys
) -> None:
    uri, run = "s3://tests/pruned", tmp_path / "runs/a"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    write_run(run, f"trainer.checkpoint_folder={uri}", "trainer.keep_every=4ba")
    (tmp_path / "made").mkdir()
    write_checkpoints(tmp_path / "made", uri, (2, 4, 6, 8, 10))
    storage.write(f"{uri}/ep0-ba3/__0_0.distcp", b"half-written")
    storage.write(f"{uri}/ep0-ba11/__0_0.distcp", b"half-written")
    storage.write(f"{uri}/averages/ba2.safetensors", b"an average")

    def names() -> list[str]:
        return [found.name for found in RemoteCheckpoints(uri, timeout=60).present()]

    everything = ["ep0-ba2.pt", "ep0-ba3", "ep0-ba4.pt", "ep0-ba6.pt", "ep0-ba8.pt", "ep0-ba10.pt", "ep0-ba11"]
    runs_command.prune([tmp_path], 1, is_confirmed=False)
    listed = capsys.readouterr().out.splitlines()
    assert listed[:-1] == [f"{uri}/ep0-ba2.pt", f"{uri}/ep0-ba6.pt"]
    assert names() == everything
    hold(run, host="elsewhere")
    runs_command.prune([tmp_path], 1, is_confirmed=True)
    assert names() == everything
    assert f"{run}  is skipped: it is running" in capsys.readouterr().out
    (run / LEASE).unlink()
    runs_command.prune([tmp_path], 1, is_confirmed=True)
    assert names() == ["ep0-ba3", "ep0-ba4.pt", "ep0-ba8.pt", "ep0-ba10.pt", "ep0-ba11"]
    assert storage.exists(f"{uri}/averages/ba2.safetensors")
    assert resolve_checkpoint(uri).read_bytes() == (tmp_path / "made/ep0-ba10.pt").read_bytes()
