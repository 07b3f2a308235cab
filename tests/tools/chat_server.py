"""A server that speaks the chat-completions protocol in the process of the tests, with faults on request."""

import contextlib
import hashlib
import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "toy/describer"
KEY = "key-of-the-tests-0123"

Behaviour = Callable[[str, int], str]
"""What to do by image (hash of its URL; the text of a request without one) and number of the request for it."""


class ChatServer(ThreadingHTTPServer):
    """Answers with captions that name the image, or as `behaviour` says: see `_Handler.do_POST`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, behaviour: Behaviour, key: str | None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.behaviour, self.key = behaviour, key
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.requests: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.final: dict[str, list[str]] = defaultdict(list)
        """Answers by image after which nobody needs to ask again: behaviours that sent one whole."""
        self.stall = 0.8
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have gone."""


class _Handler(BaseHTTPRequestHandler):
    server: ChatServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def send(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def error(self, status: int, message: str, **headers: str) -> None:
        self.send(status, json.dumps({"error": {"message": message}}).encode(), **headers)

    def is_allowed(self) -> bool:
        if self.server.key is None or self.headers["Authorization"] == f"Bearer {self.server.key}":
            return True
        self.error(401, f"Incorrect key: {self.headers['Authorization']}")
        return False

    def do_GET(self) -> None:
        if self.is_allowed():
            self.send(200, json.dumps({"data": [{"id": MODEL}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_allowed():
            return
        content = body["messages"][-1]["content"]
        subject = content if isinstance(content, str) else content[0]["image_url"]["url"]
        image = hashlib.sha1(subject.encode()).hexdigest()
        with self.server.lock:
            self.server.requests.append(body)
            number = self.server.asked[image]
            self.server.asked[image] += 1
        behaviour = self.server.behaviour(image, number)
        texts = {f"caption_{i}": f"The {image} {'with detail ' * i}." for i in range(1, 4)}
        text, reason = json.dumps(texts), "stop"
        if behaviour.isdigit():
            self.error(
                int(behaviour), "some message", **({"Retry_After": "0.2"} if behaviour in ("429", "503") else {})
            )
            return
        if behaviour.startswith("{"):
            self.send(200, behaviour.encode())
            return
        if behaviour == "reset":
            self.close_connection = True
            return
        if behaviour == "stall":
            time.sleep(self.server.stall)
            self.close_connection = True
            return
        if behaviour == "nonsense":
            self.send(200, b"<html>It works!</html>")
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
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            for byte in answer:
                self.wfile.write(bytes([byte]))
                time.sleep(0.05)
            return
        self.send(200, answer)
        if behaviour in ("", "markdown", "refuse"):
            with self.server.lock:
                self.server.final[image].append(behaviour)


@contextlib.contextmanager
def chat_server(
    behaviour: Behaviour = lambda image, number: "", key: str | None = None, port: int = 0
) -> Iterator[ChatServer]:
    """Serve during the block."""
    with ChatServer(behaviour, key, port) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


FAULTS = ("429", "500", "503", "stall", "reset", "nonsense", "prose", "loop", "cut", "markdown", "trickle")


def faulty(image: str, number: int) -> str:
    """A fault for every third request; one image of 16 is always refused, one of 16 an error, one of 16 prose."""
    kind = int(image[0], 16)
    if kind < 3:
        return ("refuse", "500", "prose")[kind]
    chance = random.Random(f"{image} {number}")
    return chance.choice(FAULTS) if chance.random() < 0.2 and number < 3 else ""
