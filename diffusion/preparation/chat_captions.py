"""Captioner: a vision-language model behind a server that speaks the chat-completions protocol.

captioner:
  chat:
    model: Qwen/Qwen3-VL-30B-A3B-Instruct
    server: {url: http://localhost:8000/v1}

Several captions of an image come in one answer, a JSON object. An answer that is no such object, repeats itself or
breaks off is asked for again; a refusal is not. Each answer goes to a journal as it comes: a start after a kill asks
again for the images whose requests were under way, at most `concurrency` of each worker, and for no other.
"""

import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from PIL import Image

from diffusion import storage
from diffusion.chat import Chat, Reply, UnansweredError, declines, is_refusal, shown_answer
from diffusion.errors import ConfigurationError, UnavailableError, explained_writes
from diffusion.files import append_json_lines, read_json_lines
from diffusion.formats.data_set import ANSWERS, METADATA, SCORES
from diffusion.preparation.config import ChatCaptionsConfig
from diffusion.preparation.layout import CAPTIONS, GENERATED_CAPTIONS, file_numbers, local_copies, part_name, read_table
from diffusion.preparation.metadata import removal_hash
from diffusion.preparation.removed import Removed
from diffusion.reports.page import image_uri

_JPEG_QUALITY = 90

_MAX_USELESS = 32
"""Images without a usable answer at the start of a worker after which it ends: more would cost money for nothing."""

_RESTORED = "restored"
"""Folder beside the journals: answers for partitions that were discarded. Every partition looks there."""

_MIN_TRIPLES, _MIN_DISTINCT = 24, 0.6
"""A text with so many sequences of three words is repetitive if less than this share of them is distinct."""


class Outcome(str, Enum):
    """Result of asking for the captions of an image."""

    captioned = "captioned"
    refused = "refused"
    repetitive = "repetitive"
    invalid = "invalid"
    """Not the JSON object that was asked for."""
    failed = "failed"
    """The server answers other images, and not this one."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Captions of an image, and what they took."""

    texts: list[str]
    outcome: Outcome
    requests: int
    """Answers of the model, of which the last counts."""
    failures: int
    """Attempts without an answer."""
    prompt_tokens: int
    completion_tokens: int
    dollars: float | None
    detail: str = ""
    """Beginning of an answer that cannot be used, or message of the server."""


COUNTS = ("requests", "failures", "prompt_tokens", "completion_tokens")
"""Fields of an answer that are added up, beside the dollars."""

ANSWER_TYPE = pa.struct(
    {"outcome": pa.string(), **dict.fromkeys(COUNTS, pa.int64()), "dollars": pa.float64(), "detail": pa.string()}
)
"""Type of the column `answers` beside the captions: an `Answer` without its texts."""


class _UselessError(ConfigurationError):
    """The first answers of a model cannot be used."""


class ChatCaptioner:
    """Asks for the captions of several images at the same time."""

    def __init__(self, chat: ChatCaptionsConfig) -> None:
        """Check that the server is there and has the model.

        Raises:
            UnavailableError: it is not there.
            ConfigurationError: it refuses the key, or has no such model.
        """
        self._config = chat
        self._chat = Chat(chat.server, chat.model)
        self._chat.check()
        self._keys = [f"caption_{i + 1}" for i in range(len(chat.words))]
        self._num_useless: int | None = 0
        """Unusable answers so far; None after the first usable one."""

    def __call__(self, images: Sequence[Image.Image], captions: Sequence[list[str]]) -> list[list[str]]:
        """Return the captions of each image; none for one without a usable answer."""
        found = dict(self.stream(zip(range(len(images)), images, captions, strict=True)))
        return [found[i].texts for i in range(len(images))]

    def stream(
        self,
        images: Iterable[tuple[int, Image.Image, list[str]]],
        has_captions: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[int, Answer]]:
        """Yield the answers for numbered images with their captions, as they come.

        After an error the answers under way are yielded first. `has_captions` says if the model has captioned images of
        this data set at other times or in other workers.

        Raises:
            ConfigurationError: the server rejects every request, or the first answers cannot be used.
            UnavailableError: it does not answer any more.
        """
        source, limit = iter(images), self._config.server.concurrency
        pending: dict[Future[Answer], int] = {}
        useless: list[tuple[int, Answer]] = []
        error: BaseException | None = None
        with ThreadPoolExecutor(limit) as pool:
            try:
                while True:
                    try:
                        for number, image, captions in itertools.islice(source, 0 if error else limit - len(pending)):
                            url = data_url(image, self._config.max_side)
                            if not pending:
                                self._chat.begin()
                            pending[pool.submit(self._caption, url, captions)] = number
                    except Exception as raised:  # noqa: BLE001 it is raised below
                        error = raised
                    if not pending:
                        break
                    for future in wait(pending, return_when=FIRST_COMPLETED).done:
                        number = pending.pop(future)
                        if (raised := future.exception()) is not None:
                            error = error or raised
                            self._chat.stop()
                            continue
                        useless.append((number, future.result()))
                        error = error or self._judge(future.result(), has_captions)
                        if self._num_useless is None:
                            yield from useless
                            useless.clear()
            finally:
                if pending:  # The consumer has failed.
                    self._chat.stop()
        if not isinstance(error, _UselessError):
            yield from useless
        if isinstance(error, UnavailableError):
            raise UnavailableError(f"{error}. What was answered is kept") from error
        if error is not None:
            raise error

    def _judge(self, answer: Answer, has_captions: Callable[[], bool]) -> ConfigurationError | None:
        """Count the answers up to the first that can be used; return an error if they are too many."""
        if answer.outcome is Outcome.captioned:
            self._num_useless = None
        elif self._num_useless is not None:
            self._num_useless += 1
            if self._num_useless >= _MAX_USELESS:
                if has_captions():
                    self._num_useless = None
                    return None
                return _UselessError(
                    f"none of the first {self._num_useless} images got captions from {self._config.model}: the last "
                    f"answer was {answer.outcome.value} ({answer.detail}); correct model, prompt, max_tokens or options"
                )
        return None

    def _caption(self, url: str, captions: Sequence[str]) -> Answer:
        """Ask for the captions of an image until the answer can be used."""
        server, counts = self._config.server, Counter[str]()
        outcome, texts, detail = Outcome.failed, list[str](), ""
        answers_others = False
        while counts["requests"] < server.attempts and outcome not in (Outcome.captioned, Outcome.refused):
            try:
                reply = self._ask(url, captions, counts["requests"])
            except UnansweredError as error:
                counts["failures"] += error.failures
                outcome, detail = Outcome.failed, str(error)
                was_there, answers_others = answers_others, self._answers_others(error)
                if answers_others and (was_there or error.is_rejected):
                    break
                continue  # It may have come back meanwhile, or the client loses its patience.
            counts["requests"] += 1
            for name in ("failures", "prompt_tokens", "completion_tokens"):
                counts[name] += getattr(reply, name)
            outcome, texts = read_reply(reply, self._keys)
            detail = "" if texts else shown_answer(" ".join(reply.text.split()))[:200]
        dollars = server.dollars(counts["prompt_tokens"], counts["completion_tokens"])
        numbers = {name: counts[name] for name in COUNTS}
        return Answer(texts=texts, outcome=outcome, detail=detail, dollars=dollars, **numbers)

    def _ask(self, url: str, captions: Sequence[str], earlier: int) -> Reply:
        """Ask once; later attempts are further from the first than the same request would be."""
        config = self._config
        lengths = {key: f"about {words} words" for key, words in zip(self._keys, config.words, strict=True)}
        prompt = config.prompt.replace("{captions}", "\n".join(captions))
        prompt += f"\n\nAnswer with a JSON object of captions of these lengths: {json.dumps(lengths)}"
        schema = {
            "type": "object",
            "properties": {key: {"type": "string"} for key in self._keys},
            "required": self._keys,
            "additionalProperties": False,
        }
        image = {"type": "image_url", "image_url": {"url": url}}
        described = {"type": "json_schema", "json_schema": {"name": "captions", "strict": True, "schema": schema}}
        temperature = config.temperature
        return self._chat.ask(
            [{"role": "user", "content": [image, {"type": "text", "text": prompt}]}],
            {
                "temperature": max(temperature, 0.7) if earlier and temperature is not None else temperature,
                "max_tokens": config.max_tokens,
                "response_format": described if config.structured else None,
                **config.options,
            },
        )

    def _answers_others(self, error: UnansweredError) -> bool:
        """Ask about a plain image; a ConfigurationError if the server rejects that, too."""
        try:
            self._ask(data_url(Image.new("RGB", (64, 64), "grey"), self._config.max_side), ["a plain image"], 0)
        except UnansweredError as other:
            if error.is_rejected and other.is_rejected:
                raise ConfigurationError(
                    f"{self._config.server.url} rejects every image: {other}; the model must take images, and "
                    "`structured: false` asks for no JSON schema"
                ) from error
            return False
        return True


def data_url(image: Image.Image, max_side: int) -> str:
    """Reduce an image, and write it as JPEG into a URL."""
    image = image.copy()
    image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)
    return image_uri(image, jpeg_quality=_JPEG_QUALITY)


def read_reply(reply: Reply, keys: Sequence[str]) -> tuple[Outcome, list[str]]:
    """Judge an answer of the model; return its captions too, if they can be used."""
    start, stop = reply.text.find("{"), reply.text.rfind("}") + 1  # Some models put it into a block of Markdown.
    try:
        value = json.loads(reply.text[start:stop])
    except (ValueError, RecursionError):
        value = None
    texts = [value.get(key) for key in keys] if isinstance(value, dict) else []
    texts = [" ".join(text.split()) for text in texts if isinstance(text, str)]
    if is_refusal(reply) or (texts and all(map(declines, texts))):
        return Outcome.refused, []
    if any(map(is_repetitive, texts or [reply.text])):
        return Outcome.repetitive, []
    if len(texts) < len(keys) or not all(texts) or len(set(texts)) < len(texts) or any(map(declines, texts)):
        return Outcome.invalid, []
    return Outcome.captioned, texts


def is_repetitive(text: str) -> bool:
    """Return whether a text repeats a word, or most of its sequences of three words, as models do in a loop."""
    words = re.findall(r"\w+", text.lower())
    triples = list(zip(words, words[1:], words[2:], strict=False))
    if any(len({*words[i : i + 5]}) == 1 for i in range(len(words) - 4)):
        return True
    return len(triples) >= _MIN_TRIPLES and len({*triples}) < _MIN_DISTINCT * len(triples)


class Journal:
    """Answers for a partition that is not captioned yet: lines of JSON, by image and source captions.

    A file of this machine gets each answer at once. In an object store `concurrency` of them are an object, so that a
    kill may lose as many again.
    """

    def __init__(self, out: str, number: int, concurrency: int) -> None:
        self._out, self._name = out, f"{number:06d}"
        self._uri = storage.join(out, ANSWERS, self._name)
        self._path = None if storage.is_url(out) else Path(f"{self._uri}.jsonl")
        self._size = concurrency if self._path is None else 1
        self._rows: list[dict[str, Any]] = []

    @staticmethod
    def identify(row: dict[str, Any]) -> str:
        """Hash what determines the request of an image."""
        return xxhash.xxh3_128_hexdigest(json.dumps([row["xxh128"], row["captions"]]))

    def read(self, identities: Container[str] | None = None) -> dict[str, Answer]:
        """Read the answers of earlier starts, and the restored ones, for all images or some."""
        own = [self._path.name] if self._path else _list_files(self._out, self._name)
        found = read_answers(self._out, [*own, *_list_files(self._out, _RESTORED)], identities)
        return dict(reversed([*found]))  # The first answer for an image has the costs.

    def add(self, identity: str, answer: Answer, *hashes: str) -> None:
        """Keep an answer; `hashes` are the `image_hashes`."""
        self._rows.append({"id": identity, "hashes": hashes, **asdict(answer)})
        if len(self._rows) >= self._size:
            self.flush()

    def flush(self) -> None:
        """Write what was gathered."""
        rows, self._rows = self._rows, []
        if rows and self._path is not None:
            with explained_writes(self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                append_json_lines(self._path, rows)
        elif rows:
            _write_rows(self._uri, rows)

    def remove(self) -> None:
        """Remove the answers: the partition is captioned."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        else:
            storage.delete(storage.join(self._uri, name) for name in storage.list_files(self._uri))


def image_hashes(row: Mapping[str, Any]) -> list[str]:
    """Return the hashes by which `removed.json` names an image."""
    return [removal_hash(row["key"]), row["xxh128"]]


def read_answers(
    out: str, names: Iterable[str] | None = None, identities: Container[str] | None = None
) -> Iterator[tuple[str, Answer]]:
    """Yield the answers in all files below `answers`, or in some, for all images or some; damaged lines are none."""
    for name in _list_files(out) if names is None else names:
        for row in _read_rows(out, name):
            if (identities is None or str(row.get("id")) in identities) and (found := _read_row(row)):
                yield found


def restore_answers(out: str, numbers: Iterable[int]) -> None:
    """Move the answers of all journals, and copy those beside the captions of some partitions, to `answers/restored`.

    A repetition after a kill writes the same files.
    """
    restored = storage.join(out, ANSWERS, _RESTORED)
    for number in file_numbers(storage.join(out, SCORES, CAPTIONS)).intersection(numbers):
        name = part_name(number)
        captioned = read_table(storage.join(out, SCORES, CAPTIONS, name)).to_pylist()
        rows = read_table(storage.join(out, METADATA, name), ["key", "xxh128", "captions"]).to_pylist()
        answers = []
        for row, one in zip(rows, captioned, strict=True):
            if answer := one.get(ANSWERS):
                texts = [one[CAPTIONS][i] for i in one[GENERATED_CAPTIONS] or ()]
                answers.append({"id": Journal.identify(row), "hashes": image_hashes(row), **answer, "texts": texts})
        _write_rows(restored, answers)
    for name in _list_files(out):
        if not name.startswith(f"{_RESTORED}/"):
            _write_rows(restored, _read_rows(out, name))
            storage.delete([storage.join(out, ANSWERS, name)])


def erase_answers(out: str) -> None:
    """Drop the answers for removed images, and those of earlier versions, which name no image."""
    removed = Removed.read(out)
    for name in _list_files(out):
        rows = [*_read_rows(out, name)]
        kept = [row for row in rows if removed.isdisjoint(row.get("hashes") or removed)]
        if len(kept) < len(rows):
            storage.write(storage.join(out, ANSWERS, name), _as_lines(kept))


def _list_files(out: str, *folder: str) -> list[str]:
    """List the files below `answers`, or in a folder there, by their names below `answers`."""
    return [storage.join(*folder, name) for name in storage.list_files(storage.join(out, ANSWERS, *folder))]


def _read_rows(out: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file below `answers`."""
    with tempfile.TemporaryDirectory() as temporary:
        path = local_copies(storage.join(out, ANSWERS), [name], Path(temporary)) / name
        yield from filter(None, read_json_lines(path))


def _write_rows(folder: str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file that is named by its content."""
    if content := _as_lines(rows):
        storage.write(storage.join(folder, f"{xxhash.xxh3_64_hexdigest(content)}.jsonl"), content)


def _as_lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _read_row(row: Mapping[str, Any]) -> tuple[str, Answer] | None:
    """Read a row of a journal; nothing from one of another form, so that the image is asked for again."""
    try:
        values = {name: value for name, value in row.items() if name not in ("id", "hashes")}
        identity, answer = str(row["id"]), Answer(**{**values, "outcome": Outcome(row["outcome"])})
        pa.array([asdict(answer)], ANSWER_TYPE)
        pa.array([answer.texts], pa.list_(pa.string()))
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None
    return identity, answer


def count_answer(answer: Answer) -> Counter[str]:
    """Return an answer's numbers, to be added up."""
    numbers = {name: getattr(answer, name) or 0 for name in (*COUNTS, "dollars")}
    return Counter({"images": 1, answer.outcome.value: 1, **numbers})


def describe_answers(counts: Counter[str]) -> str:
    """Write the numbers of answers into a line."""
    outcomes = ", ".join(f"{counts[one.value]:,} {one.value}" for one in Outcome if counts[one.value])
    price = f", ${1000 * counts['dollars'] / counts['images']:.2f} per 1,000 images" if counts["dollars"] else ""
    return (
        f"{counts['images']:,} images: {outcomes}; {counts['requests']:,} answers after {counts['failures']:,} failed "
        f"attempts, {counts['prompt_tokens']:,} prompt and {counts['completion_tokens']:,} completion tokens{price}"
    )
