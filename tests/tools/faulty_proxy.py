"""A proxy in front of an S3 server with the faults of a test: errors, silence, cut and damaged answers."""

import http.client
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath

Fault = Callable[[str, int], str | None]
"""Name of an object and how often it was asked for (from 1) -> error, silent, cut, damage, drop or None."""


class FaultyProxy:
    """Passes requests on to a server.

    Args:
        port: of the server.
        fault: what goes wrong with a GET.
    """

    def __init__(self, port: int, fault: Fault = lambda name, count: None) -> None:
        self.port, self.fault = port, fault
        self.requests: Counter[str] = Counter()
        """GETs by object name."""

        self.ended = threading.Event()
        self._counting = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                proxy.answer(self)

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        name = PurePosixPath(request.path.partition("?")[0]).name
        fault = None
        if request.command == "GET":
            with self._counting:  # Each request has a thread.
                self.requests[name] += 1
                fault = self.fault(name, self.requests[name])
        if fault == "silent":
            self.ended.wait(60)
        if fault in ("silent", "drop"):
            request.close_connection = True
            return
        if fault == "error":
            request.send_response(500)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
            content = request.rfile.read(int(request.headers.get("Content-Length", 0)))
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
