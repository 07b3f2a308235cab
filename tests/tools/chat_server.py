"""A server that speaks the chat-completions protocol in the process of the tests, with faults on request."""

import contextlib
import hashlib
import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.tools.web import WebServer, body_of, send

MODEL = "toy/describer"
KEY = "key-of-the-tests-0123"

Behaviour = Callable[[str, int], str]
"""What to do by image (hash of its URL; the text of a request without one) and number of the request for it."""


class ChatServer(WebServer):
    """Answers with captions that name the image, or as `behaviour` says."""

    def __init__(self, behaviour: Behaviour, key: str | None, port: int = 0) -> None:
        self.behaviour, self.key = behaviour, key
        self.requests: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.final: dict[str, list[str]] = defaultdict(list)
        """Answers by image after which nobody needs to ask again: behaviours that sent one whole."""
        self.stall = 0.8
        self.lock = threading.Lock()
        super().__init__(port)
        self.url += "/v1"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = body_of(request)
        if self.key is not None and (found := request.headers["Authorization"]) != f"Bearer {self.key}":
            error(request, 401, f"Incorrect key: {found}")
        elif request.command == "GET":
            send(request, 200, json.dumps({"data": [{"id": MODEL}]}).encode())
        else:
            self._complete(request, json.loads(body))

    def _complete(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        content = body["messages"][-1]["content"]
        subject = content if isinstance(content, str) else content[0]["image_url"]["url"]
        image = hashlib.sha1(subject.encode()).hexdigest()
        with self.lock:
            self.requests.append(body)
            number = self.asked[image]
            self.asked[image] += 1
        behaviour = self.behaviour(image, number)
        texts = {f"caption_{i}": f"The {image} {'with detail ' * i}." for i in range(1, 4)}
        text, reason = json.dumps(texts), "stop"
        if behaviour.isdigit():
            later = {"Retry_After": "0.2"} if behaviour in ("429", "503") else {}
            error(request, int(behaviour), "some message", **later)
            return
        if behaviour.startswith("{"):
            send(request, 200, behaviour.encode())
            return
        if behaviour == "reset":
            request.close_connection = True
            return
        if behaviour == "stall":
            time.sleep(self.stall)
            request.close_connection = True
            return
        if behaviour == "nonsense":
            send(request, 200, b"<html>It works!</html>")
            return
        if behaviour == "refuse":
            text = "I'm sorry, but I cannot describe this image."
        elif behaviour == "loop":
            text = json.dumps({**texts, "caption_3": "a dog on " * 40})
        elif behaviour == "prose":
            text = "A fine image."
        elif behaviour == "cut":
            text, reason = text[:-20], "length"
        elif behaviour == "markdown":
            text = f"Here it is:\n```json\n{text}\n```"
        elif behaviour == "echo":
            text = f"Rewritten: {body['messages'][-1]['content']}"
        choice = {"message": {"content": text}, "finish_reason": reason}
        answer = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 300, "completion_tokens": 40}}).encode()
        if behaviour == "trickle":
            request.send_response(200)
            request.send_header("Content-Length", str(len(answer)))
            request.end_headers()
            for byte in answer:
                request.wfile.write(bytes([byte]))
                time.sleep(0.05)
            return
        send(request, 200, answer)
        if behaviour in ("", "markdown", "refuse"):
            with self.lock:
                self.final[image].append(behaviour)


def error(request: BaseHTTPRequestHandler, status: int, message: str, **headers: str) -> None:
    """Answer with an error."""
    send(request, status, json.dumps({"error": {"message": message}}).encode(), **headers)


@contextlib.contextmanager
def chat_server(
    behaviour: Behaviour = lambda image, number: "", key: str | None = None, port: int = 0
) -> Iterator[ChatServer]:
    """Serve during the block."""
    with contextlib.closing(ChatServer(behaviour, key, port)) as server:
        yield server


FAULTS = ("429", "500", "503", "stall", "reset", "nonsense", "prose", "loop", "cut", "markdown", "trickle")


def faulty(image: str, number: int) -> str:
    """A fault for every third request; one image of 16 is always refused, one of 16 an error, one of 16 prose."""
    kind = int(image[0], 16)
    if kind < 3:
        return ("refuse", "500", "prose")[kind]
    chance = random.Random(f"{image} {number}")
    return chance.choice(FAULTS) if chance.random() < 0.2 and number < 3 else ""
