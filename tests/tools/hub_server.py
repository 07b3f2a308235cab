"""A stand-in of the Hugging Face hub: what `create_repo`, `upload_folder` and `upload_file` ask of it over HTTP.

Test modules import the fixture: `from tests.tools.hub_server import hub`.
"""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import huggingface_hub.constants
import pytest

from tests.tools.web import WebServer, body_of, send

TOKEN = "hf_" + "a" * 34
"""May write everything."""


class Hub(WebServer):
    """Repositories in memory."""

    def __init__(self) -> None:
        self.is_private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        """Content by repository and path."""
        self.large: dict[str, bytes] = {}
        """Content of large files by SHA-256."""
        super().__init__()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = body_of(request)
        status, content = self._answer(request, body)
        send(request, status, b"" if content is None else json.dumps(content).encode(), Content_Type="application/json")

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict | None]:
        if request.command == "PUT":
            self.large[request.path.rpartition("/")[2]] = body
        if request.command in ("PUT", "HEAD"):
            return 200, None
        if request.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials in Authorization header"}
        if request.path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if request.path == "/api/repos/create":
            asked = json.loads(body)
            repository = f"{asked['organization']}/{asked['name']}"
            is_new = repository not in self.files
            self.files.setdefault(repository, {})
            self.is_private.setdefault(repository, asked["visibility"] == "private")
            return 200 if is_new else 409, {"url": f"{self.url}/{repository}"}
        if request.path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.url}/large/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return 200, {"transfer": "basic", "objects": objects}
        _, _, _, user, name, action, _ = request.path.split("/")
        if f"{user}/{name}" not in self.files:
            return 404, {"error": "Repository not found"}
        if action == "preupload":
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        assert action == "commit", request.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[f"{user}/{name}"][value["path"]] = base64.b64decode(value["content"])
            if line["key"] == "lfsFile":
                self.files[f"{user}/{name}"][value["path"]] = self.large[value["oid"]]
        oid = "0" * 40
        return 200, {"commitUrl": f"{self.url}/{user}/{name}/commit/{oid}", "commitOid": oid}


@pytest.fixture
def hub(monkeypatch) -> Iterator[Hub]:
    """A hub at the endpoint of huggingface_hub, without repositories."""
    server = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # This hub speaks LFS alone.
    yield server
    server.close()
