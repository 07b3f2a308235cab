"""A proxy in front of an S3 server with the faults of a test: errors, silence, cut and damaged answers.

Test modules import the fixture with those of the server: `from tests.tools.faulty_proxy import proxy`.
"""

import http.client
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import PurePosixPath

import pytest

from tests.tools.s3_server import S3Server
from tests.tools.web import WebServer, body_of, send

Fault = Callable[[str, int], str | None]
"""Name of an object and how often it was asked for (from 1) -> error, silent, cut, damage, drop or None."""


class FaultyProxy(WebServer):
    """Passes requests on to a server.

    Args:
        port: of the server.
        fault: what goes wrong with a GET.
    """

    def __init__(self, port: int, fault: Fault = lambda name, count: None) -> None:
        self.port, self.fault = port, fault
        self.requests: Counter[str] = Counter()
        """GETs by object name."""

        self.uploads: Counter[str] = Counter()
        """PUTs by object name."""

        self.ended = threading.Event()
        self._counting = threading.Lock()
        super().__init__()

    def close(self) -> None:
        self.ended.set()
        super().close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = PurePosixPath(request.path.partition("?")[0]).name
        fault = None
        with self._counting:  # Each request has a thread.
            if request.command == "PUT":
                self.uploads[name] += 1
            if request.command == "GET":
                self.requests[name] += 1
                fault = self.fault(name, self.requests[name])
        if fault == "silent":
            self.ended.wait(60)
        if fault in ("silent", "drop"):
            request.close_connection = True
            return
        if fault == "error":
            send(request, 500)
            return
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            content = body_of(request)
            connection.request(request.command, request.path, content or None, dict(request.headers))
            answer = connection.getresponse()
            body = answer.read()
        except OSError:
            request.close_connection = True
            return
        request.send_response(answer.status)
        for header, value in answer.getheaders():
            if header.lower() not in ("transfer-encoding", "connection"):
                request.send_header(header, value)
        request.end_headers()
        if fault == "damage":
            body = body[:-1] + bytes([body[-1] ^ 1])
        request.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
        request.close_connection = request.close_connection or fault == "cut"


@pytest.fixture
def proxy(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """A proxy in front of the server, at the address in the environment."""
    proxy = FaultyProxy(s3_server.port)
    monkeypatch.setenv("S3_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()
