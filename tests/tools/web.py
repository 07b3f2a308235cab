"""A web server in a thread of the tests."""

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that have gone, and print other errors."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class WebServer:
    """Passes each request, in a thread of its own, to `answer` of a subclass."""

    def __init__(self, port: int = 0) -> None:
        web = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                web.answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request, with `send`."""
        raise NotImplementedError

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


def body_of(request: BaseHTTPRequestHandler) -> bytes:
    """Body of a request."""
    return request.rfile.read(int(request.headers.get("Content-Length", 0)))


def send(request: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    """Send an answer; headers have _ in place of -."""
    request.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        request.send_header(name.replace("_", "-"), value)
    request.end_headers()
    request.wfile.write(body)
