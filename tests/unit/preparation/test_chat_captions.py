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
from diffusion.config.fields import section_problems
from diffusion.config.loading import from_dict
from diffusion.errors import ConfigurationError, DataError, UnavailableError
from diffusion.preparation.chat_captions import Answer, ChatCaptioner, Journal, Outcome, read_reply, restore_answers
from diffusion.preparation.config import CaptionerConfig, ChatCaptionsConfig, PrepareConfig
from diffusion.preparation.engine import Workers
from diffusion.preparation.layout import part_name
from diffusion.preparation.score import score
from tests.tools.chat_server import KEY, MODEL, chat_server
from tests.tools.forking import free_port
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
        (["500"] * 9, "failed", 0, 6),
        (["500"] * 3, "captioned", 1, 3),
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
        ({"url": "http://127.0.0.1:1/v1"}, {}, UnavailableError, "no chat server answers at http://127.0.0.1:1/v1"),
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
    monkeypatch.setenv("MY_API_KEY", f"{KEY}\n")
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
        ("500", UnavailableError, "has answered nothing for"),
        ("429", UnavailableError, "has answered nothing for"),
        ("prose", ConfigurationError, "none of the first 32 images .* invalid .A fine image"),
    ],
)
def test_a_server_that_answers_no_image_ends_the_command(behaviour, kind, message):
    with chat_server(lambda image, number: behaviour) as server:
        asks = captioner(server.url, {"patience_seconds": 0.8})
        with pytest.raises(kind, match=message):
            ask(asks, 40)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        ('{"message": "no credits", "code": 402}', ConfigurationError, "rejects every image: 402 no credits"),
        ('{"message": "bad key", "code": "401"}', ConfigurationError, "refuses requests without a key .*: 401 bad key"),
        ('{"message": "no credits"}', UnavailableError, "no credits"),
        ('"no credits"', UnavailableError, "no credits"),
    ],
)
def test_an_error_within_an_answer_is_named(error, kind, message):
    with chat_server(lambda image, number: f'{{"error": {error}, "choices": []}}') as server:
        asks = captioner(server.url, {"patience_seconds": 0.8})
        with pytest.raises(kind, match=message):
            ask(asks, 2)


def test_odd_numbers_of_tokens(tmp_path):
    texts = {f"caption_{i}": f"A dog {'of words ' * i}." for i in (1, 2, 3)}
    choices = json.dumps([{"message": {"content": json.dumps(texts)}}])

    def behave(image: str, number: int) -> str:
        tokens = f'{{"prompt_tokens": {2**70 if number else "1e999"}, "completion_tokens": -5}}'
        return f'{{"choices": {choices}, "usage": {tokens}}}'

    data = write_scan(tmp_path)
    with chat_server(behave) as server:
        run(data, server.url)
    found = [row["answers"] for row in answers(data.out, 0) if row["answers"]]
    assert [(one["outcome"], one["failures"], one["completion_tokens"]) for one in found] == [("captioned", 1, 0)] * 6
    assert all(2**30 < one["prompt_tokens"] < 2**40 for one in found)


def test_useless_answers_at_the_start_count_only_before_any_captions():
    with chat_server(lambda image, number: "refuse") as server:
        images = [(i, Image.new("RGB", (50, 50), (i * 6, 0, 0)), []) for i in range(40)]
        found = captioner(server.url).stream(images, lambda: True)
        assert [answer.outcome for _, answer in found] == [Outcome.refused] * 40


def test_answers_before_the_first_captions_survive_the_death_of_the_server():
    is_first = True

    def images():
        yield 0, Image.new("RGB", (50, 50)), []
        yield from ((i, Image.new("RGB", (50, 50), (i, 0, 0)), []) for i in range(1, 3))

    with chat_server(lambda image, number: "refuse") as server:
        answers, found = captioner(server.url, {"concurrency": 1, "patience_seconds": 0.6}).stream(images()), []

        def behave(image: str, number: int) -> str:
            nonlocal is_first
            was_first, is_first = is_first, False
            return "refuse" if was_first else "500"

        server.behaviour = behave
        with pytest.raises(UnavailableError):
            found.extend(answer for _, answer in answers)
    assert [answer.outcome for answer in found] == [Outcome.refused]


@pytest.mark.parametrize("key", ["a-secret\nof two lines", "a-secret-ü"])
def test_a_key_with_other_characters_is_not_shown(monkeypatch, key):
    monkeypatch.setenv("MY_API_KEY", key)
    with pytest.raises(ConfigurationError, match="MY_API_KEY holds characters") as raised:
        captioner("http://127.0.0.1:1/v1", {"key_variable": "MY_API_KEY"})
    assert "a-secret" not in str(raised.value)


def test_an_answer_that_repeats_the_key_is_kept_without_it(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", KEY)
    choice = {"message": {"content": f"Your key {KEY} is \x1b[31mwrong"}}
    with chat_server(lambda image, number: json.dumps({"choices": [choice]}), key=KEY) as server:
        [answer] = ask(captioner(server.url, {"key_variable": "MY_API_KEY"}))
    assert answer.outcome is Outcome.invalid and answer.detail.isprintable()
    assert "Your key" in answer.detail and KEY not in answer.detail


def test_mistaken_places_of_a_key_are_not_shown():
    server = {"url": "http://127.0.0.1:1/v1", "key_variable": "pasted-0123"}
    section = from_dict(
        CaptionerConfig, {"chat": {"model": "x", "server": server, "options": {"api_key": "y"}}}, "test"
    )
    problems = list(section_problems(section, "captioner"))
    assert len(problems) == 2 and "pasted" not in str(problems)


def test_journal_rows_of_another_form_are_no_answers(tmp_path):
    numbers = {"requests": 1, "failures": 0, "prompt_tokens": 1, "completion_tokens": 1, "dollars": None}
    journal = Journal(str(tmp_path), 0, 1)
    journal.add("a", Answer(texts=["x"], outcome=Outcome.captioned, **numbers))
    with (tmp_path / "answers/000000.jsonl").open("a") as file:
        for row in ([1], "b", 5, {"id": "b"}, {"id": "b", "outcome": "captioned", "texts": 5, **numbers},
                    {"id": "b", "outcome": "captioned", "texts": [], **numbers, "requests": "many"},
                    {"id": "b", "outcome": "captioned", "texts": [], **numbers, "requests": 2**70}):  # fmt: skip
            file.write(json.dumps(row) + "\n")
    assert {*journal.read()} == {"a"}
    restore_answers(str(tmp_path), [0])
    assert {*Journal(str(tmp_path), 1, 1).read()} == {"a"}, "partitions may be numbered anew"


def test_a_server_that_is_gone_for_a_while_loses_no_image():
    port = free_port()
    with chat_server(port=port) as server:
        asks = captioner(server.url)
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(ask, asks, 2)
        time.sleep(0.3)
        with chat_server(port=port):
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
        ('{"caption_1": "A dog.", "caption_2": "I cannot identify people in images."}', "invalid"),
        ("I'm unable to help with that.", "refused"),
        ('{"caption_1": "I. A. Sorry, a painter, in a hat.", "caption_2": "A painter who is sorry."}', "captioned"),
        ('{"caption_1": "A dog.", "caption_2": "A dog dog dog dog dog."}', "repetitive"),
        ('{"caption_1": "A sign: 1,000,000,000,000.", "caption_2": "A sign: HA HA HA HA."}', "captioned"),
        ('{"caption_1": "\\"Sorry, We Are Closed\\" sign.", "caption_2": "Afraid child behind a tree."}', "captioned"),
        (
            '{"caption_1": "I can\u2019t help with that.", "caption_2": "I\u2019m sorry, but I can\u2019t see it."}',
            "refused",
        ),
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
        assert (len(server.requests), list(data.out.glob("answers/*"))) == (6 + 3, [])
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
    monkeypatch.setattr(
        storage, "list_files", lambda uri: [name.removeprefix(f"{uri}/") for name in objects if name.startswith(uri)]
    )
    monkeypatch.setattr(
        storage, "download", lambda uri, path: path.parent.mkdir(exist_ok=True) or path.write_bytes(objects[uri])
    )
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
