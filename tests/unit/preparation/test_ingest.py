"""Ingestion: what a data set grows by, in this process."""

import contextlib
import json
import os
import time
from contextlib import ExitStack
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from diffusion import storage
from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.formats.data_set import PreparedManifest
from diffusion.preparation import ingest
from diffusion.preparation.config import CaptionerConfig, PrepareConfig
from diffusion.preparation.ingest import Ingestion, find_failing, find_missing, list_arrivals
from diffusion.preparation.notifications import Message, Queue, parse_event
from diffusion.preparation.output import claim
from diffusion.preparation.prepare import discard_unfinished
from diffusion.preparation.scan import open_configured
from diffusion.preparation.score import score
from diffusion.preparation.sources.base import size_of_partitions
from diffusion.preparation.sources.folder import FolderSource
from diffusion.preparation.sources.parquet import ParquetSource
from diffusion.preparation.takedown import take_down
from tests.tools.chat_server import MODEL, chat_server
from tests.tools.image_files import noise, sample, tree, write_folder, write_mds, write_table, write_tar
from tests.tools.preparing import prepare
from tests.tools.scored_data import CALLS
from tests.unit.preparation.test_growing import keys

OPTIONS = {"edges": [16, 34], "partition_size": 6, "validation_fraction": 0.2}


def config_of(source, out):
    config = PrepareConfig(sources=[str(source)], out=str(out), workers=1, partition_size=6, validation_fraction=0.2)
    config.buckets.edges = [16, 34]
    return config


def ingestion_of(source, out, **options) -> Ingestion:
    options = {"interval": 1.0, "size": 1e9, "poll": 0.01, "attempts": 2, "report": False, **options}
    return Ingestion(config_of(source, out), **options)


def dead_letters(out):
    path = out / "dead_letters.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_look_opens_no_table_that_is_known(tmp_path, monkeypatch):
    source = tmp_path / "set"
    source.mkdir()

    def upload(name):
        write_table(source / f"{name}.parquet", {"image": [noise(40, 35)], "caption": ["x"]})

    for number in range(3):
        upload(number)
    ingestion = ingestion_of(source, tmp_path / "out")
    ingestion.grow()
    opened, original = [], ParquetSource.open
    monkeypatch.setattr(
        ParquetSource, "open", lambda self, file, **options: opened.append(file) or original(self, file, **options)
    )
    assert ingestion._look() == []
    assert opened == []
    upload("new")
    assert [one.file for one in ingestion._look()] == ["new.parquet"]
    assert set(opened) == {"new.parquet"}


def test_many_rows_give_few_partitions():
    sizes = {num: size_of_partitions(None, num) for num in (10, 10**4, 10**7, 790 * 10**6)}
    assert sizes == {10: 16, 10**4: 157, 10**7: 1024, 790 * 10**6: 7900}


@pytest.mark.parametrize("kind", ["images", "tars"])
def test_the_result_is_that_of_preparations_of_what_was_there(tmp_path, kind):
    source = tmp_path / "set"
    source.mkdir()
    ingestion = ingestion_of(source, tmp_path / "out")
    ingestion.grow()
    assert not (tmp_path / "out" / "scan.json").exists(), "nothing is there yet"
    for number in range(3):
        if kind == "images":
            write_folder(source, 5, start=number * 10)
        else:
            members = [one for i in range(4) for one in sample(f"{i}", noise(40, 35, number * 10 + i), b"x")]
            write_tar(source / f"{number}.tar", members)
        ingestion.grow()
        prepare([source], tmp_path / "prepared", **OPTIONS)
        ingestion.grow()
        assert tree(tmp_path / "out") == tree(tmp_path / "prepared")
    assert len(PreparedManifest.read(str(tmp_path / "out")).generations) == 3


class Meanwhile:
    """Changes a folder while the ingestion waits between two looks, once."""

    def __init__(self, change):
        self.changes = [change]

    def wait(self, seconds):
        while self.changes:
            self.changes.pop()()


def test_many_messages_and_many_images(tmp_path):
    """Comparing each name with each row would take 10 seconds."""
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 4)
    prepare([source], out, **OPTIONS)
    take_down(str(out), {"set/0001.png"}, erase=True)
    part = out / "metadata" / "000000.parquet"
    files = pa.table({"file": [f"{i}.png" for i in range(100_000)]})
    pq.write_table(pa.concat_tables([pq.read_table(part), files], promote_options="default"), part)
    config = config_of(source, out)
    uris = [f"{source}/{name}.png" for name in ("0000", "0001", "99999", "new", *range(99_500, 100_500))]
    start = time.process_time()
    missing = find_missing(config, open_configured(config), uris)
    assert time.process_time() - start < 2
    assert missing == {f"{source}/{name}.png" for name in ("new", *range(100_000, 100_500))}


def test_a_file_that_is_being_written_waits(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 6)
    content, half = noise(40, 35, 99), tmp_path / "set" / "late.png"
    half.write_bytes(content[:1000])
    half.with_suffix(".txt").write_text("late")
    ingestion = ingestion_of(source, out)
    ingestion._pause = Meanwhile(lambda: half.write_bytes(content))  # pyright: ignore[reportAttributeAccessIssue]
    ingestion.grow()
    assert PreparedManifest.read(str(out)).seen == 6
    ingestion._pause = Meanwhile(lambda: write_folder(source, 1, start=50))  # pyright: ignore[reportAttributeAccessIssue]
    ingestion.grow()
    manifest = PreparedManifest.read(str(out))
    assert (manifest.seen, manifest.kept) == (7, 7), "what came between two looks waits, too"


def test_a_caption_that_comes_before_its_image_or_at_once_after(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 6)
    (source / "first.txt").write_text("a caption")
    (source / "second.png").write_bytes(noise(40, 35, 1))
    ingestion = ingestion_of(source, out)
    ingestion._pause = Meanwhile(lambda: (source / "second.txt").write_text("x"))  # pyright: ignore[reportAttributeAccessIssue]
    ingestion.grow()
    assert PreparedManifest.read(str(out)).seen == 6
    (source / "first.png").write_bytes(noise(40, 35, 2))
    ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == 8


def test_the_only_image_gets_its_caption_between_two_looks(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    source.mkdir()
    (source / "0.png").write_bytes(noise(40, 35, 1))
    ingestion = ingestion_of(source, out)
    ingestion._pause = Meanwhile(lambda: (source / "0.txt").write_text("x"))  # pyright: ignore[reportAttributeAccessIssue]
    ingestion.grow()
    assert not (out / "manifest.json").exists()
    ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == 1


def test_what_is_gone_or_has_changed_does_not_matter(tmp_path, caplog):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 6)
    ingestion = ingestion_of(source, out)
    ingestion.grow()
    before = keys(out)
    (source / "0000.png").unlink()
    (source / "0001.png").write_bytes(noise(40, 35, 70))
    write_folder(source, 1, start=50)
    with pytest.raises(DataError):
        prepare([source], out, **OPTIONS)
    ingestion.grow()
    assert "0001.png" in caplog.text
    assert PreparedManifest.read(str(out)).kept == 7
    now = keys(out)
    assert all(now[place][: len(listed)] == listed for place, listed in before.items())
    assert dead_letters(out) == []


@pytest.mark.parametrize("kind", ["images", "tars"])
def test_uploads_may_be_deleted_after_their_growth(tmp_path, kind):
    source, out = tmp_path / "set", tmp_path / "out"

    def upload(number):
        if kind == "images":
            write_folder(source, 3, start=number * 10)
        else:
            write_tar(source / f"{number}.tar", sample("a", noise(40, 35, number), b"x"))

    source.mkdir()
    upload(0)
    ingestion_of(source, out).grow()
    for path in source.iterdir():
        path.unlink()
    ingestion, queue = ingestion_of(source, out), Deliveries()
    ingestion.complete()
    ingestion._queue = queue  # pyright: ignore[reportAttributeAccessIssue]
    name = "0000.png" if kind == "images" else "0.tar"
    ingestion.grow([message("earlier", str(source / name))])
    assert (queue.deleted, dead_letters(out)) == (["earlier"], [])
    kept = PreparedManifest.read(str(out)).kept
    upload(1)
    ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == 2 * kept


def test_a_data_set_begins_when_a_bucket_has_enough_images(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 3)
    ingestion = ingestion_of(source, out)
    buckets = ingestion._config.buckets
    buckets.edges, buckets.sizes, buckets.min_samples = None, ["32x32"], 4
    ingestion._config.validation_fraction = 0.0
    ingestion.grow()
    assert not (out / "manifest.json").exists()
    ingestion.complete()
    write_folder(source, 3, start=10)
    ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == 6


def test_a_data_set_begins_with_the_first_image_that_is_kept(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    source.mkdir()
    (source / "bad.png").write_bytes(b"x")
    (source / "bad.txt").write_text("x")
    ingestion_of(source, out).grow()
    ingestion = ingestion_of(source, out)
    ingestion.complete()
    write_folder(source, 3)
    ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == 3


@pytest.fixture
def denied(monkeypatch):
    """Names of images that cannot be read, as in a store that denies access to them."""
    names, record = set(), FolderSource._record

    def reading(self, item):
        for name in names:
            if json.loads(item)["file"] == name:
                if name == "deadly.png":
                    os._exit(9)
                raise MachineError(f"{name}: access denied")
        return record(self, item)

    monkeypatch.setattr(FolderSource, "_record", reading)
    monkeypatch.setattr(ingest, "Workers", lambda number: ingest_workers())  # Here, where the patch is.
    return names


def ingest_workers():
    from diffusion.preparation.engine import Workers

    return Workers(number=1)


def test_an_object_that_fails_again_and_again_is_a_dead_letter_and_blocks_no_other(tmp_path, denied):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 9)
    denied.add("0004.png")
    ingestion = ingestion_of(source, out)
    ingestion.grow()
    manifest = PreparedManifest.read(str(out))
    assert (manifest.seen, dead_letters(out)) == (8, [])
    ingestion.grow()
    (letter,) = dead_letters(out)
    assert (letter["object"], letter["reason"]) == (str(source / "0004.png"), "0004.png: access denied")
    denied.clear()
    ingestion, queue = ingestion_of(source, out), Deliveries()
    ingestion._queue = queue  # pyright: ignore[reportAttributeAccessIssue]
    ingestion.grow([message("once", letter["object"]), message("often", letter["object"], deliveries=2)])
    assert (queue.deleted, dead_letters(out)) == (["often"], [letter])
    assert PreparedManifest.read(str(out)) == manifest
    os.utime(source / "0004.png", ns=(0, 0))
    ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == 9, "it was uploaded again"
    assert dead_letters(out) == [], "and can be taken down without a trace"


def test_a_growth_waits_for_a_takedown(tmp_path, monkeypatch):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 3)
    ingestion = ingestion_of(source, out)
    ingestion.grow()
    write_folder(source, 3, start=10)
    monkeypatch.setattr(ingest, "find_failing", searching := Mock(return_value={}))
    with ExitStack() as takedown:
        takedown.enter_context(claim(str(out), "prepared"))
        waits = iter([Mock(), takedown.close])  # Between two looks, and for the takedown.
        monkeypatch.setattr(ingestion, "_pause", Mock(wait=lambda _: next(waits)()))
        ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == 6
    assert [call.args[2] for call in searching.call_args_list] == [[]], "no arrival is suspected"


def test_a_growth_that_failed_leaves_nothing(tmp_path, denied):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 9)
    prepare([source], out, **OPTIONS)
    prepare([source], tmp_path / "undisturbed", **OPTIONS)
    before = tree(out)
    write_folder(source, 8, start=50)
    denied.add("0057.png")
    with pytest.raises(MachineError):
        prepare([source], out, **OPTIONS)
    assert tree(out) != before
    ingestion = ingestion_of(source, out)
    ingestion.complete()
    assert tree(out) == before
    ingestion.grow()
    (source / "0057.png").rename(tmp_path / "0057.png")
    (source / "0057.txt").rename(tmp_path / "0057.txt")
    prepare([source], tmp_path / "undisturbed", **OPTIONS)
    assert keys(out) == keys(tmp_path / "undisturbed")


def test_an_error_that_is_not_of_an_object_ends_the_ingestion(tmp_path, monkeypatch):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 4)
    ingestion = ingestion_of(source, out)

    def full(*_, **__):
        raise MachineError("no space")

    with monkeypatch.context() as patch, pytest.raises(MachineError, match="no space"):
        patch.setattr("diffusion.preparation.prepare.write", full)
        ingestion.grow()
    ingestion_of(source, out).complete()
    assert PreparedManifest.read(str(out)).kept == 4
    assert dead_letters(out) == []


@pytest.mark.parametrize("full", [[".mds"], [".mds", "/failing-"]])
def test_a_full_disk_discards_no_captions(tmp_path, monkeypatch, denied, full):
    source, out = tmp_path / "set", tmp_path / "out"
    CALLS.clear()

    def captioning():
        ingestion = ingestion_of(source, out)
        ingestion._config.captioner = CaptionerConfig(path="tests.tools.scored_data.Captioner")
        return ingestion

    write_folder(source, 3)
    captioning().grow()
    write_folder(source, 3, start=10)
    write = storage.write

    def writing(uri, *arguments):
        if any(name in uri for name in full):
            raise MachineError(f"cannot write to {uri}: no space")
        write(uri, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", writing)
        for attempt in (captioning().grow, captioning().complete):
            with pytest.raises(MachineError, match="no space"):
                attempt()
    captioning().complete()
    assert PreparedManifest.read(str(out)).kept == 6
    assert sum(map(len, CALLS)) == 6
    assert dead_letters(out) == []


def test_other_settings_discard_no_growth(tmp_path, monkeypatch):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 3)
    ingestion_of(source, out).grow()
    write_folder(source, 3, start=10)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("diffusion.preparation.prepare.write", Mock(side_effect=KeyboardInterrupt))
        ingestion_of(source, out).grow()
    before = tree(out)
    write_folder(source, 3, start=20)
    for attempt in ("complete", "grow"):
        ingestion = ingestion_of(source, out)
        ingestion._config.seed = 5
        with pytest.raises(DataError, match="seed"):
            getattr(ingestion, attempt)()
    assert tree(out) == before


def asking_ingestion_of(source, out, server) -> Ingestion:
    ingestion = ingestion_of(source, out)
    chat = {"model": MODEL, "server": {"url": server.url}}
    ingestion._config.captioner = from_dict(CaptionerConfig, {"chat": chat}, "test")
    return ingestion


@pytest.mark.usefixtures("denied")
@pytest.mark.parametrize("kind", ["images", "tars"])
def test_a_growth_that_is_begun_again_asks_no_server_again(tmp_path, monkeypatch, kind):
    source, out = tmp_path / "set", tmp_path / "out"
    source.mkdir()

    def upload(start):
        if kind == "images":
            write_folder(source, 3, start=start)
        else:
            for number in range(start, start + 3):
                write_tar(source / f"{number:04}.tar", sample("a", noise(40, 35, number), b"x"))

    def score_and_delete(*arguments, **options):
        score(*arguments, **options)
        for path in source.glob("0010.[pt][na][gr]"):
            path.unlink()

    with chat_server() as server:
        upload(0)
        ingestion = asking_ingestion_of(source, out, server)
        ingestion.grow()
        upload(10)
        monkeypatch.setattr("diffusion.preparation.prepare.score", score_and_delete)
        ingestion.grow()
    manifest = PreparedManifest.read(str(out))
    assert [one.kept for one in manifest.generations] == [3, 2]
    assert set(server.asked.values()) == {1}
    assert not (out / "answers").exists()


@pytest.mark.parametrize(("num", "is_before"), [(0, True), (3, False)])
def test_captions_survive_a_kill_before_or_after_the_scan_forgets_them(tmp_path, monkeypatch, num, is_before):
    source, out = tmp_path / "set", tmp_path / "out"
    source.mkdir()
    with chat_server() as server:
        if num:
            write_folder(source, num)
            asking_ingestion_of(source, out, server).grow()
        write_folder(source, 3, start=10)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("diffusion.preparation.prepare.write", Mock(side_effect=KeyboardInterrupt))
            asking_ingestion_of(source, out, server).grow()
        (source / "0010.png").unlink()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            if is_before:
                patch.setattr("diffusion.preparation.scan.Scan.write", Mock(side_effect=KeyboardInterrupt))
            discard_unfinished(str(out))
        ingestion = asking_ingestion_of(source, out, server)
        ingestion.complete()
        ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == num + 2
    assert set(server.asked.values()) == {1}


def test_an_image_of_a_discarded_growth_is_erased(tmp_path, monkeypatch):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 3)
    with chat_server() as server:
        asking_ingestion_of(source, out, server).grow()
        write_folder(source, 2, start=10)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("diffusion.preparation.prepare.write", Mock(side_effect=KeyboardInterrupt))
            asking_ingestion_of(source, out, server).grow()
    table = pq.read_table(out / "metadata" / "000001.parquet").to_pylist()
    captions = pq.read_table(out / "scores" / "captions" / "000001.parquet")["captions"].to_pylist()
    texts = {row["key"]: listed[-1] for row, listed in zip(table, captions, strict=True)}
    discard_unfinished(str(out))
    take_down(str(out), ["set/0010.png"], erase=True)
    found = b"".join(tree(out / "answers").values()).decode()
    assert [key for key, text in texts.items() if text in found] == ["set/0011.png"]


def write_rows(path, column, seed):
    write_table(path, {"image": [noise(40, 35, seed + i) for i in range(3)], column: ["x"] * 3})


def write_text(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)


@pytest.mark.parametrize(
    ("kind", "write", "letters"),
    [
        ("parquet", lambda source: write_rows(source / "b.parquet", "caption_en", 9), ["b.parquet"]),
        ("images", lambda source: write_text(source / "mallory" / "metadata.jsonl", "{no"), ["mallory/metadata.jsonl"]),
        ("images", lambda source: write_text(source / "mallory" / "metadata.csv", "a,b\n"), ["mallory/metadata.csv"]),
        ("images", lambda source: write_tar(source / "x.tar", sample("0", noise(40, 35, 9), b"x")), []),
        ("mds", lambda source: write_text(source / "index.json", "{no"), [""]),
    ],
)
def test_a_file_that_cannot_be_listed_blocks_no_other(tmp_path, kind, write, letters):
    source, out = tmp_path / "set", tmp_path / "out"

    def add(start):
        if kind == "parquet":
            write_rows(source / f"{start}.parquet", "caption", start)
        else:
            write_folder(source if kind == "images" else tmp_path / "images", 3, start=start)

    source.mkdir()
    if kind == "mds":
        write_folder(tmp_path / "images", 1)
        write_mds(source, {"image": "bytes", "caption": "str"}, [{"image": noise(40, 35, 5), "caption": "x"}])
    add(20)
    sources = [source, *([tmp_path / "images"] if kind == "mds" else [])]
    ingestion = ingestion_of(source, out)
    ingestion._config.sources = list(map(str, sources))
    ingestion.grow()
    before = PreparedManifest.read(str(out)).kept
    write(source)
    if kind == "images":
        (source / "mallory").mkdir(exist_ok=True)
        (source / "mallory" / "waits.png").write_bytes(noise(40, 35, 77))
    add(40)
    ingestion.complete()
    ingestion.grow()
    assert PreparedManifest.read(str(out)).kept == before + 3
    ingestion.grow()
    assert [letter["object"] for letter in dead_letters(out)] == [f"{source}/{one}".rstrip("/") for one in letters]
    ingestion.grow()
    assert len(dead_letters(out)) == len(letters)
    for file in letters:
        if kind == "images":
            (source / file).unlink()
    ingestion.grow()
    if kind == "images":
        assert dead_letters(out) == [], "it was mended"


def test_an_image_that_ends_its_process(tmp_path):
    class DeadlySource(FolderSource):
        """A decoder that crashes."""

        def _scan(self, partition):
            if "0001.png" in partition.items[0]:
                os._exit(9)
            yield from super()._scan(partition)

    write_folder(tmp_path / "set", 2)
    config = config_of(tmp_path / "set", tmp_path / "out")
    sources = [DeadlySource(**vars(one)) for one in open_configured(config)]  # pyright: ignore[reportArgumentType]
    arrivals, _ = list_arrivals(config, sources)
    assert [uri for uri, _ in find_failing(config, sources, arrivals)] == [str(tmp_path / "set" / "0001.png")]


# Messages


class Deliveries:
    """A queue that keeps what was deleted."""

    def __init__(self):
        self.deleted = []

    def delete(self, messages):
        self.deleted += [one.id for one in messages]


def message(identifier, *uris, deliveries=1, problem=""):
    objects = dict.fromkeys(uris, 1)
    return Message(id=identifier, receipt="", num_deliveries=deliveries, body="{}", objects=objects, problem=problem)


def test_which_messages_are_deleted(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 4)
    ingestion, queue = ingestion_of(source, out, attempts=3), Deliveries()
    ingestion._queue = queue  # pyright: ignore[reportAttributeAccessIssue]
    (source / "rejected.png").write_bytes(b"x")
    (source / "rejected.txt").write_text("x")
    uris = {
        name: f"{source}/{name}" for name in ("0000.png", "0001.png", "0002.txt", "rejected.png", "gone.png", "x.pdf")
    }
    messages = [
        message("image", uris["0000.png"]),
        message("delivered twice", uris["0000.png"], deliveries=2),
        message("caption", uris["0002.txt"]),
        message("rejected", uris["rejected.png"]),
        message("no image", uris["x.pdf"]),
        message("gone", uris["gone.png"]),
        message("gone for long", uris["0001.png"], uris["gone.png"], deliveries=3),
        message("elsewhere", "s3://other/0000.png"),
        message("elsewhere for long", "s3://other/0001.png", deliveries=3),
        message("damaged", problem="not JSON"),
        message("damaged for long", problem="not JSON", deliveries=3),
    ]
    ingestion.grow(messages)
    assert queue.deleted == ["image", "delivered twice", "caption", "rejected", "no image", "gone for long",
                             "elsewhere for long", "damaged for long"]  # fmt: skip
    assert [(one["message"], one.get("objects")) for one in dead_letters(out)] == [
        ("gone for long", [uris["gone.png"]]),
        ("elsewhere for long", ["s3://other/0001.png"]),
        ("damaged for long", None),
    ]


def test_a_dead_letter_of_a_message_names_no_object_that_came_later(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 2)
    ingestion, uris = ingestion_of(source, out), [f"{source}/{number:04}.png" for number in (10, 11)]
    ingestion.grow([message("early", *uris, deliveries=9)])
    assert [one["objects"] for one in dead_letters(out)] == [uris]
    write_folder(source, 1, start=10)
    ingestion.grow()
    assert [one["objects"] for one in dead_letters(out)] == [uris[1:]]
    assert uris[0] not in (out / "dead_letters.jsonl").read_text()
    write_folder(source, 1, start=11)
    ingestion.grow()
    assert dead_letters(out) == []


def test_a_message_of_an_image_that_was_taken_down(tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    write_folder(source, 4)
    ingestion, queue = ingestion_of(source, out), Deliveries()
    ingestion._queue = queue  # pyright: ignore[reportAttributeAccessIssue]
    ingestion.grow()
    take_down(str(out), ["set/0001.png"], erase=True)
    ingestion.grow([message("again", f"{source}/0001.png", deliveries=9)])
    assert queue.deleted == ["again"]
    assert dead_letters(out) == []


def event(name="ObjectCreated:Put", key="a+b/%C3%A9.png"):
    return {"eventName": name, "s3": {"bucket": {"name": "bucket"}, "object": {"key": key, "size": 7}}}


def test_events():
    created = {"s3://bucket/a b/é.png": 7}
    assert parse_event(json.dumps({"Records": [event(), event("ObjectRemoved:Delete", "x")]})) == created
    assert parse_event(json.dumps({"Service": "Amazon S3", "Event": "s3:TestEvent", "Bucket": "bucket"})) == {}
    for body in ("", "[]", "{}", '{"Records": 3}', '{"Records": [{"eventName": "ObjectCreated:Put"}]}'):
        with pytest.raises(ValueError, match=r"\w"):
            parse_event(body)


def test_mistakes_end_it_at_once(tmp_path, monkeypatch):
    write_folder(tmp_path / "set", 1)
    with pytest.raises(ConfigurationError, match="--queue"):
        Queue("my-queue")
    queue = Queue("https://sqs.eu-west-1.amazonaws.com/123456789012/uploads")
    with pytest.raises(ConfigurationError, match="--queue"):
        ingestion_of(tmp_path / "set", tmp_path / "out", queue=queue)
    ingestion_of(tmp_path / "set", tmp_path / "out").grow()
    with pytest.raises(DataError, match="other settings"):
        other = ingestion_of(tmp_path / "set", tmp_path / "out")
        other._config.seed = 5
        other.complete()
    with pytest.raises(ConfigurationError, match="seed is -1"):
        (tmp_path / "empty").mkdir()
        empty = ingestion_of(tmp_path / "empty", tmp_path / "other")
        empty._config.seed, empty._gather = -1, Mock(side_effect=AssertionError)
        empty.run()
    with pytest.raises(DataError):
        ingestion_of(tmp_path / "nowhere", tmp_path / "other").grow()
