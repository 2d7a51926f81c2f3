"""As much of the Hugging Face hub as ``niwaki push`` speaks to, on localhost: models, their files and their cards."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub.constants
import pytest
import yaml

TOKEN = "hf_of_the_tests"


@dataclass
class Hub:
    """What is on the hub: of each model its files; and what was asked of it, in order."""

    address: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)  # large files, by SHA-256
    breaks_at: str = ""  # requests with this in their path fail


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a login."""
    there = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": there}))
    there.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", there.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)  # a protocol of its own, in Rust
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield there
    server.shutdown()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing on the screen."""

    def do_GET(self) -> None:
        self._begin()
        if self._fails():
            return
        if self.path == "/api/whoami-v2":
            self._answer({"name": "me", "type": "user", "orgs": []})
        elif "/tree/" in self.path:
            files = self.hub.models.get(self._model("/tree/"), {}).items()
            self._answer([{"type": "file", "path": path, "size": len(each), "oid": "0"} for path, each in files])
        else:
            self._answer({"error": "Not found"}, 404)

    def do_POST(self) -> None:
        self._begin()
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self._fails():
            return
        if self.path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith((".safetensors", ".gguf")) else "regular" for path in paths}
            flags = {"shouldIgnore": False, "oid": None}
            self._answer({"files": [{"path": path, "uploadMode": modes[path], **flags} for path in paths]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.hub.address}/store/{each['oid']}"}}
            self._answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"error": "Not found"}, 404)

    def do_PUT(self) -> None:
        self._begin()
        content = b""
        if length := self.headers["Content-Length"]:
            content = self.rfile.read(int(length))
        else:
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        self.hub.stored[self.path.rpartition("/")[2]] = content
        self._answer({})

    def _begin(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")

    def _model(self, behind: str) -> str:
        """The name of a model in the path, which is before that."""
        return self.path.removeprefix("/api/models/").partition(behind)[0]

    def _fails(self) -> bool:
        if self.headers["Authorization"] != f"Bearer {TOKEN}" and self.path != "/api/validate-yaml":
            self._answer({"error": "Invalid credentials"}, 401)
        elif self.hub.breaks_at and self.hub.breaks_at in self.path:
            self._answer({"error": "no space left for you"}, 400)
        else:
            return False
        return True

    def _validate(self, content: str) -> None:
        """As the hub does: what it does not take is said in a text."""
        values = yaml.safe_load(content.split("---\n")[1])
        wrong = [] if "/" in values.get("base_model", "a/b") else ["base_model is no model"]
        wrong += [] if values.get("license") != "unheard-of" else ["license is not one of these"]
        self._answer({"errors": [{"message": each} for each in wrong]}, 400 if wrong else 200)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.models:
            self._answer({"error": "You already created this model repo", "url": f"{self.hub.address}/{name}"}, 409)
            return
        self.hub.models[name] = {".gitattributes": b""}
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(name)
        self._answer({"url": f"{self.hub.address}/{name}"})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        name = self._model("/commit/")
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                self.hub.models[name][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.hub.models[name][value["path"]] = self.hub.stored[value["oid"]]
        number = "0" * 40
        url = f"{self.hub.address}/{name}/commit/{number}"
        self._answer({"success": True, "commitOid": number, "commitUrl": url})

    def _answer(self, value: Any, status: int = 200) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
