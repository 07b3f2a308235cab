"""Captions by a server: a real one in this process, with faults."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from diffusion import storage
from diffusion.chat import Reply
from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError, MachineError
from diffusion.preparation.chat_captions import Answer, ChatCaptioner, Journal, Outcome, read_reply
from diffusion.preparation.config import ChatCaptionsConfig, PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.layout import part_name
from diffusion.preparation.score import score
from tests.tools.chat_server import KEY, MODEL, chat_server
from tests.tools.scored_data import write_scan

SERVER = {"concurrency": 4, "timeout_seconds": 0.5, "attempts": 3, "patience_seconds": 2.0}


def chat(url: str, server: dict | None = None, **values) -> dict:
    return {"model": MODEL, "server": {"url": url, **SERVER, **(server or {})}, **values}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr("diffusion.chat._MIN_PAUSE", 0.02)


def captioner(url: str, server: dict | None = None, **values) -> ChatCaptioner:
    return ChatCaptioner(from_dict(ChatCaptionsConfig, chat(url, server, **values), "test"))


def ask(captioner: ChatCaptioner, num: int = 1) -> list:
    """Answers for images of different colours."""
    images = [(i, Image.new("RGB", (1000, 500), (i * 6, i * 37 % 256, 90)), ["a source"]) for i in range(num)]
    return [answer for _, answer in sorted(captioner.stream(iter(images)))]


def test_captions_of_each_length_in_one_request():
    with chat_server() as server:
        prices = {"dollars_per_million_prompt_tokens": 1.0, "dollars_per_million_completion_tokens": 10.0}
        options = {"max_side": 100, "words": [5, 60, 200], "prompt": "Like {captions}?", "options": {"top_k": 1}}
        [answer] = ask(captioner(server.url, prices, **options))
    assert (len(answer.texts), answer.outcome, answer.requests, answer.failures) == (3, Outcome.captioned, 1, 0)
    assert answer.dollars == pytest.approx(300e-6 + 400e-6)
    [request] = server.requests
    assert (request["model"], request["top_k"], request["max_tokens"]) == (MODEL, 1, 1024)
    assert request["response_format"]["json_schema"]["schema"]["required"] == ["caption_1", "caption_2", "caption_3"]
    text = request["messages"][0]["content"][1]["text"]
    assert text.startswith("Like a source?") and "about 200 words" in text


@pytest.mark.parametrize(
    ("behaviours", "outcome", "requests", "failures"),
    [
        (["500", "reset"], "captioned", 1, 2),
        (["stall", "trickle"], "captioned", 1, 2),
        (["nonsense", "429", "429", "429", "503"], "captioned", 1, 1),
        (["prose", "loop", "markdown"], "captioned", 3, 0),
        (["cut", "prose", "loop"], "repetitive", 3, 0),
        (["loop", "cut", "cut"], "invalid", 3, 0),
        (["500", "refuse"], "refused", 1, 1),
        (["500"] * 9, "failed", 0, 3),
        (["400"] * 9, "failed", 0, 1),
    ],
    ids=str,
)
def test_an_image_that_meets_faults(behaviours, outcome, requests, failures):
    with chat_server() as server:

        def behave(image: str, number: int) -> str:
            is_plain = "a plain image" in server.requests[-1]["messages"][0]["content"][1]["text"]
            return "" if is_plain or number >= len(behaviours) else behaviours[number]

        server.behaviour = behave
        asks = captioner(server.url, {"concurrency": 1, "patience_seconds": 9}, prompt="{captions}")
        asks._chat._last_answer -= 1000  # While nothing was asked.
        [answer] = ask(asks)
    assert (answer.outcome.value, answer.requests, answer.failures) == (outcome, requests, failures)
    assert bool(answer.texts) == (outcome == "captioned") == (not answer.detail)


def test_nobody_asks_before_the_time_that_the_server_names():
    with chat_server(lambda image, number: "429" if number == 0 else "") as server:
        asks, start = captioner(server.url), time.monotonic()
        assert {answer.outcome for answer in ask(asks, 8)} == {Outcome.captioned}
    assert time.monotonic() - start > 2 * 0.2, "two rounds of four"
    assert len(server.requests) == 16


@pytest.mark.parametrize(
    ("server", "values", "kind", "message"),
    [
        ({"url": "http://127.0.0.1:1/v1"}, {}, MachineError, "no chat server answers at http://127.0.0.1:1/v1"),
        (
            {"key_variable": "MY_API_KEY"},
            {"model": "toy/describe"},
            ConfigurationError,
            f"no model toy/describe; it has {MODEL}",
        ),
        ({"key_variable": "WRONG_API_KEY"}, {}, ConfigurationError, "refuses the key of WRONG_API_KEY: 401 Incorrect"),
        ({"key_variable": None}, {}, ConfigurationError, "refuses requests without a key"),
        ({"key_variable": "NO_API_KEY"}, {}, ConfigurationError, "NO_API_KEY.* is not set"),
    ],
)
def test_mistakes_end_at_once_without_the_key_in_the_message(monkeypatch, server, values, kind, message):
    monkeypatch.setenv("MY_API_KEY", KEY)
    monkeypatch.setenv("WRONG_API_KEY", "a-secret-that-is-wrong")
    monkeypatch.delenv("NO_API_KEY", raising=False)
    start = time.monotonic()
    with chat_server(key=KEY) as real:
        assert ask(captioner(real.url, {"key_variable": "MY_API_KEY"}))[0].outcome is Outcome.captioned
        with pytest.raises(kind, match=message) as raised:
            captioner(real.url, server, **values)
    assert "a-secret" not in str(raised.value)
    assert time.monotonic() - start < 3


@pytest.mark.parametrize(
    ("behaviour", "kind", "message"),
    [
        ("404", ConfigurationError, "404 some message"),
        ("400", ConfigurationError, "rejects every image: 400 some message"),
        ("403", ConfigurationError, "refuses requests without a key"),
        ("500", MachineError, "has answered nothing for"),
        ("429", MachineError, "has answered nothing for"),
        ("prose", ConfigurationError, "none of the first 32 images .* invalid .A fine image"),
    ],
)
def test_a_server_that_answers_no_image_ends_the_command(behaviour, kind, message):
    with chat_server(lambda image, number: behaviour) as server:
        asks = captioner(server.url, {"patience_seconds": 0.8})
        with pytest.raises(kind, match=message):
            ask(asks, 40)


def test_a_server_that_is_gone_for_a_while_loses_no_image():
    with chat_server() as server:
        asks = captioner(server.url)
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(ask, asks, 2)
        time.sleep(0.3)
        with chat_server(port=server.server_port):
            assert [answer.outcome for answer in answers.result()] == [Outcome.captioned] * 2


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ('{"caption_1": "A dog.", "caption_2": "A brown dog on grass."}', "captioned"),
        ('{"caption_1": "A dog.", "caption_2": "A dog."}', "invalid"),
        ('{"caption_1": "A dog."}', "invalid"),
        ('{"caption_1": "A dog.", "caption_2": ["A brown dog."]}', "invalid"),
        ('["A dog."]', "invalid"),
        ("{" * 100_000, "invalid"),
        ("", "invalid"),
        ('{"caption_1": "A dog.", "caption_2": "I cannot identify people in images."}', "refused"),
        ("I'm unable to help with that.", "refused"),
        ('{"caption_1": "I. A. Sorry, a painter, in a hat.", "caption_2": "A painter who is sorry."}', "captioned"),
        ('{"caption_1": "A dog.", "caption_2": "A dog dog dog dog."}', "repetitive"),
    ],
)
def test_answers_are_judged(text, outcome):
    reply = Reply(text=text, finish_reason="stop", prompt_tokens=0, completion_tokens=0, failures=0)
    assert read_reply(reply, ["caption_1", "caption_2"])[0].value == outcome


def run(data, url: str, **values) -> None:
    config = {"sources": ["a"], "out": str(data.out), "captioner": {"mode": "beside", "chat": chat(url, **values)}}
    score(from_dict(PrepareConfig, config, "test"), data.scan, workers=Workers())


def answers(out: Path, number: int) -> list:
    return pq.read_table(out / "scores/captions" / part_name(number)).to_pylist()


def test_parts_hold_answers_and_unfinished_ones_a_journal(tmp_path):
    data = write_scan(tmp_path)
    white = Path(data.source.folder, "1/2.png")
    content = white.read_bytes()
    white.write_bytes(b"changed")
    with chat_server() as server:
        with pytest.raises(DataError, match=r"1/2\.png has changed"):
            run(data, server.url)
        journal = data.out / "answers/000001.jsonl"
        assert len(journal.read_text().splitlines()) == 2
        with journal.open("a") as file:
            file.write('{"id": "cut o')
        assert len(server.requests) == 6 + 2
        white.write_bytes(content)
        run(data, server.url)
        assert (len(server.requests), list(data.out.glob("answers"))) == (6 + 3, [])
        run(data, f"{server.url}/")
        assert len(server.requests) == 9, "the address does not determine the data"
        with pytest.raises(DataError, match=r"captions of toy/describer .*words: \[12, 50, 150\], not \[9\]"):
            run(data, server.url, words=[9])
    rows = answers(data.out, 1)
    assert [len(row["captions"]) for row in rows] == [1 + 3] * 3
    assert rows[0]["generated_captions"] == [1, 2, 3]
    assert rows[0]["answers"]["outcome"] == "captioned"
    assert [row["answers"] is None for row in answers(data.out, 0)] == [False] * 5 + [True, False]
    assert "server" not in json.loads((data.out / "scores.json").read_text())["captions"]["chat"]


def test_answers_in_an_object_store_are_gathered(monkeypatch):
    objects: dict[str, bytes] = {}
    monkeypatch.setattr(storage, "write", objects.__setitem__)
    monkeypatch.setattr(storage, "list_files", lambda folder: [name.rpartition("/")[2] for name in objects])
    monkeypatch.setattr(storage, "download", lambda uri, path: path.write_bytes(objects[uri]))
    monkeypatch.setattr(storage, "delete", lambda uris: [objects.pop(uri) for uri in uris])
    numbers = {"requests": 1, "failures": 0, "prompt_tokens": 1, "completion_tokens": 1, "dollars": None}
    answers = {name: Answer(texts=[name], outcome=Outcome.captioned, **numbers) for name in "abc"}
    journal = Journal("s3://bucket/out", 3, 2)
    for name, answer in answers.items():
        journal.add(name, answer)
    assert {*journal.read()} == {"a", "b"}
    journal.flush()
    assert (journal.read(), len(objects)) == (answers, 2)
    journal.remove()
    assert journal.read() == {}
