"""Ingestion as a process of its own: polls of a folder, and notifications of a real server of S3 and SQS."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from boto3.session import Session

from diffusion import storage
from diffusion.formats.data_set import POSITIONS, PreparedManifest
from diffusion.preparation.layout import read_table
from tests.tools.forking import free_port
from tests.tools.image_files import noise, tree, write_folder
from tests.tools.preparing import prepare
from tests.tools.training_runs import BIN, TrainingServer
from tests.tools.waiting import wait_until
from tests.unit.preparation.test_ingest import ingestion_of

pytestmark = pytest.mark.slow

LIMIT = 300.0
OPTIONS = {"edges": [16, 34], "partition_size": 6}
YAML = """
sources: ???
out: ???
workers: 1
partition_size: 6
buckets: {edges: [16, 34]}
"""
ARGUMENTS = ["--interval", "1s", "--poll", "0.2s", "--attempts", "2", "--no-report"]

KILLED = """
import os, signal, sys
from diffusion import storage
from diffusion.preparation.notifications import Queue

moment = sys.argv.pop(1)
original = storage.write

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def write(uri, content, access=None):
    if moment in uri:
        die()
    original(uri, content, access)

storage.write = write
if moment == "delete":
    Queue.delete = die

from diffusion.launch import run_command
from scripts.ingest import main
from tests.tools.waiting import wait_until
raise SystemExit(run_command(main))
"""
"""An ingestion that kills itself before it writes a file of some name, or before it deletes messages."""


class Ingestion:
    """A process of scripts/ingest.py."""

    def __init__(
        self, server: TrainingServer, folder: Path, source: str, out: str, *options: str, killed: str | None = None
    ):
        (folder / "prepare.yaml").write_text(YAML)
        program = ["scripts/ingest.py"] if killed is None else ["-c", KILLED, killed]
        command = [*program, str(folder / "prepare.yaml"), f"sources=[{source}]", f"out={out}"]
        self.job = server.start(0, [*command, *ARGUMENTS, *options])

    def wait_for(self, ready: Callable[[], bool]) -> None:
        self.job.wait_for(lambda: time.sleep(0.1) or ready())

    def await_end(self) -> int:
        return self.job.finish(LIMIT).codes[0]

    def end(self, number: int, code: int) -> None:
        os.kill(self.job.pids[0], number)
        assert self.await_end() == code, self.job.output

    def __enter__(self) -> "Ingestion":
        return self

    def __exit__(self, *_: Any) -> None:
        self.job.kill()


def num_seen(out: str) -> int:
    """Images of the finished data set."""
    return PreparedManifest.read(out).seen if storage.exists(f"{out}/manifest.json") else 0


def keys_of(out: str) -> list[str]:
    """Keys of all samples that were written, sorted."""
    files = [file.uri for name, file in storage.list_files(f"{out}/{POSITIONS}").items() if name.endswith(".parquet")]
    return sorted(key for uri in files for key in read_table(uri)["key"].to_pylist())


def move_images(made: Path, source: Path) -> None:
    """Put images into a folder, each as a whole and behind its caption."""
    for path in sorted(made.iterdir(), key=lambda path: path.suffix, reverse=True):
        path.rename(source / path.name)


def test_a_folder_is_polled_until_sigterm(server, tmp_path):
    source, out = tmp_path / "set", tmp_path / "out"
    source.mkdir()
    with Ingestion(server, tmp_path, str(source), str(out)) as ingestion:
        for number in (1, 2):
            write_folder(tmp_path / "made", 7, start=number * 10)
            move_images(tmp_path / "made", source)
            ingestion.wait_for(lambda number=number: num_seen(str(out)) == 7 * number)
        ingestion.end(signal.SIGTERM, 0)
    write_folder(source, 1)
    with Ingestion(server, tmp_path, str(source), str(out)) as ingestion:
        ingestion.wait_for(lambda: num_seen(str(out)) == 15)
        ingestion.end(signal.SIGINT, 130)
    assert keys_of(str(out)) == [f"set/{number:04d}.png" for number in (0, *range(10, 17), *range(20, 27))]


class Cloud(NamedTuple):
    """A server with a bucket whose notifications go to a queue."""

    s3: Any
    sqs: Any
    queue: str

    def upload(self, numbers: Sequence[int]) -> None:
        """Put images, captions first."""
        for number in numbers:
            self.s3.put_object(Bucket="uploads", Key=f"set/{number} é.txt", Body=f"image {number}".encode())
            self.s3.put_object(Bucket="uploads", Key=f"set/{number} é.png", Body=noise(40, 33, number))

    def send(self, *keys: str) -> None:
        """Deliver notifications again."""
        for key in keys:
            event = {"bucket": {"name": "uploads"}, "object": {"key": key, "size": 1}}
            record = {"eventName": "ObjectCreated:Put", "s3": event}
            self.sqs.send_message(QueueUrl=self.queue, MessageBody=json.dumps({"Records": [record]}))

    def num_messages(self) -> int:
        """Messages that were not deleted, in flight or not; what becomes visible between both counts is in neither."""
        names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
        answers = [self.sqs.get_queue_attributes(QueueUrl=self.queue, AttributeNames=names) for _ in range(2)]
        return max(sum(int(answer["Attributes"][name]) for name in names) for answer in answers)


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server of S3 and SQS."""
    port = free_port()
    with (tmp_path_factory.mktemp("server") / "log.txt").open("wb") as output:
        server = subprocess.Popen([BIN / "moto_server", "-p", str(port)], stdout=output, stderr=output)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/moto-api/"), "moto does not answer", LIMIT, server)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5)
    except OSError:
        return False
    return True


@pytest.fixture
def cloud(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"))
    for name, value in {
        "S3_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    storage._s3_client.cache_clear()
    s3, sqs = (Session().client(name, endpoint_url=endpoint) for name in ("s3", "sqs"))
    for bucket in ("uploads", "prepared"):
        s3.create_bucket(Bucket=bucket)
    queue = sqs.create_queue(QueueName="uploads")["QueueUrl"]
    attributes = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]
    notified = {"QueueArn": attributes["QueueArn"], "Events": ["s3:ObjectCreated:*"]}
    s3.put_bucket_notification_configuration(
        Bucket="uploads", NotificationConfiguration={"QueueConfigurations": [notified]}
    )
    yield Cloud(s3, sqs, queue)
    storage._s3_client.cache_clear()


def keys_for(numbers: Sequence[int]) -> list[str]:
    return sorted(f"set/{number} é.png" for number in numbers)


def test_notifications_duplicates_and_dead_letters(server, tmp_path, cloud: Cloud):
    out = "s3://prepared/set"
    cloud.upload(range(4))
    with Ingestion(server, tmp_path, "s3://uploads/set", out, "--queue", cloud.queue) as ingestion:
        ingestion.wait_for(lambda: num_seen(out) == 4 and cloud.num_messages() == 0)
        cloud.send("set/0+%C3%A9.png", "set/0+%C3%A9.png", "set/1+%C3%A9.txt")
        cloud.upload([4])
        cloud.send("set/gone.png", "elsewhere.png")
        cloud.s3.put_object(Bucket="uploads", Key="set/archived.png", Body=noise(40, 33, 50), StorageClass="GLACIER")
        cloud.sqs.send_message(QueueUrl=cloud.queue, MessageBody="no event")
        ingestion.wait_for(lambda: num_seen(out) == 5 and cloud.num_messages() == 0)
        ingestion.end(signal.SIGTERM, 0)
    assert keys_of(out) == keys_for(range(5))
    letters = [json.loads(line) for line in storage.read(f"{out}/dead_letters.jsonl").splitlines()]
    named = {name for one in letters for name in (one.get("object"), one.get("body"), *one.get("objects", ()))}
    assert named - {None} == {
        "no event",
        "s3://uploads/elsewhere.png",
        "s3://uploads/set/archived.png",  # S3 does not give it out.
        "s3://uploads/set/gone.png",
    }


def test_a_prefix_is_polled(tmp_path, cloud: Cloud):
    ingestion = ingestion_of("s3://uploads/set", tmp_path / "out")
    ingestion.grow()
    for numbers in (range(3), range(3, 5)):
        cloud.upload(numbers)
        ingestion.grow()
    assert [one.kept for one in PreparedManifest.read(str(tmp_path / "out")).generations] == [3, 2]


@pytest.mark.parametrize("moment", ["manifest.json", "delete"])
def test_killed_and_continued(server, tmp_path, cloud: Cloud, moment):
    """SIGKILL before the data set is published, and between the append and the deletion of messages."""
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    options = ["s3://uploads/set", str(out), "--queue", cloud.queue]
    cloud.upload(range(8))
    for folder in (out, undisturbed):
        prepare(["s3://uploads/set"], folder, **OPTIONS)
    cloud.upload(range(8, 14))
    num_messages = cloud.num_messages()
    with Ingestion(server, tmp_path, *options, killed=moment) as ingestion:
        assert ingestion.await_end() == -signal.SIGKILL
    assert num_seen(str(out)) == (14 if moment == "delete" else 8)
    assert cloud.num_messages() == num_messages, "no message was deleted"
    with Ingestion(server, tmp_path, *options) as ingestion:
        ingestion.wait_for(lambda: num_seen(str(out)) == 14 and cloud.num_messages() == 0)
        ingestion.end(signal.SIGTERM, 0)
    prepare(["s3://uploads/set"], undisturbed, **OPTIONS)
    assert tree(out) == tree(undisturbed)
    assert keys_of(str(out)) == keys_for(range(14))
