"""A stand-in of the Hugging Face hub: what `create_repo`, `upload_folder` and `upload_file` ask of it over HTTP.

Test modules import the fixture: `from tests.tools.hub_server import hub`.
"""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest

TOKEN = "hf_" + "a" * 34
"""May write everything."""


class Hub(ThreadingHTTPServer):
    """Repositories in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.is_private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        """Content by repository and path."""
        self.large: dict[str, bytes] = {}
        """Content of large files by SHA-256."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(200)

    def do_PUT(self) -> None:
        self.server.large[self.path.rpartition("/")[2]] = self._body()
        self._answer(200)

    def do_POST(self) -> None:
        body, hub = self._body(), self.server
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials in Authorization header"})
        if self.path == "/api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repository = f"{asked['organization']}/{asked['name']}"
            is_new = repository not in hub.files
            hub.files.setdefault(repository, {})
            hub.is_private.setdefault(repository, asked["visibility"] == "private")
            return self._answer(200 if is_new else 409, {"url": f"{hub.endpoint}/{repository}"})
        if self.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{hub.endpoint}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self._answer(200, {"transfer": "basic", "objects": objects})
        _, _, _, user, name, action, _ = self.path.split("/")
        if f"{user}/{name}" not in hub.files:
            return self._answer(404, {"error": "Repository not found"})
        if action == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self._answer(200, {"files": files})
        assert action == "commit", self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.files[f"{user}/{name}"][value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                hub.files[f"{user}/{name}"][value["path"]] = hub.large[value["oid"]]
        oid = "0" * 40
        return self._answer(200, {"commitUrl": f"{hub.endpoint}/{user}/{name}/commit/{oid}", "commitOid": oid})

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, content: dict | None = None) -> None:
        data = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    """A hub at the endpoint of huggingface_hub, without repositories."""
    with Hub() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # This hub speaks LFS alone.
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
