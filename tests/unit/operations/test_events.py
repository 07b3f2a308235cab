"""Events are written, posted, and nothing depends on whether they arrive."""

import json
import logging
from http.server import BaseHTTPRequestHandler

import pytest

from diffusion.formats.run_folder import EVENTS
from diffusion.operations.events import EventKind, EventLog, read_events
from tests.tools.web import WebServer, body_of, send


@pytest.fixture
def receiver():
    """An address that takes posts, and what came."""
    posts: list[dict] = []

    class Receiver(WebServer):
        def answer(self, request: BaseHTTPRequestHandler) -> None:
            posts.append(json.loads(body_of(request)))
            send(request, 500 if posts[-1]["event"] == "stopped" else 200)

    server = Receiver()
    yield f"{server.url}/services/HUSH", posts
    server.close()


def test_each_event_is_a_line_and_a_post(tmp_path, receiver):
    webhook, posts = receiver
    log = EventLog(tmp_path / "phase1", webhook)
    log.add(EventKind.hang, "no sign of any rank", step=7)
    log.add(EventKind.finished, code=0)
    log.close()
    rows = read_events(tmp_path / "phase1")
    assert [(row["event"], row["reason"]) for row in rows] == [("hang", "no sign of any rank"), ("finished", "")]
    assert rows[0]["step"] == 7
    assert [post["text"] for post in posts] == ["phase1: hang no sign of any rank", "phase1: finished"]
    assert posts[0]["step"] == 7


def test_an_event_is_written_posted_and_logged_without_secrets(tmp_path, receiver, caplog):
    webhook, posts = receiver
    log = EventLog(tmp_path, webhook)
    log.add(EventKind.ended, "ValueError: sftp://me:planted@host/x", host="hf_plantedplantedplantedplanted")
    log.close()
    assert "ValueError" in posts[0]["reason"]
    assert "planted" not in f"{read_events(tmp_path)}{posts}{caplog.text}"


def test_an_address_that_refuses_or_is_not_there_harms_nothing_and_is_not_told(tmp_path, receiver, caplog):
    caplog.set_level(logging.DEBUG, "diffusion")
    for webhook in (receiver[0], "http://127.0.0.1:1/services/HUSH", "HUSH"):
        log = EventLog(tmp_path, webhook)
        log.add(EventKind.stopped)
        log.close()
    assert len(read_events(tmp_path)) == 3
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"time": "2026')
    assert len(read_events(tmp_path)) == 3, "a line that was cut off is skipped"
    failures = [record.getMessage() for record in caplog.records if "was not posted" in record.getMessage()]
    assert failures == [
        "event stopped was not posted: status 500",
        "event stopped was not posted: ConnectionError",
        "event stopped was not posted: MissingSchema",
    ]
    assert "HUSH" not in caplog.text
