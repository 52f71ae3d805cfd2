"""A container registry on the loopback: manifests, blobs, and tokens for who asks for one.

Source: the OCI distribution specification, and the token authentication of the Distribution project.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

from tests.fakes.http_faults import Answer, FaultyServer, Seen

TITLE = "org.opencontainers.image.title"


class RegistryServer(FaultyServer):
    """The repository team/model. `auth`: what it asks for, and `login` who may have it; empty: everybody."""

    def __init__(self, auth: str = "", login: str = "") -> None:
        super().__init__()
        self.auth = auth
        self.login = login
        self.token = "first"
        self.tags: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}

    @property
    def name(self) -> str:
        """Of registry and repository."""
        return f"{urlsplit(self.url).netloc}/team/model"

    def push(self, files: Mapping[str, bytes], tag: str = "v1", media_type: str = "", key: str = TITLE) -> str:
        """Put files there as `oras push` does. Returns the manifest's digest."""
        layers = []
        for name, data in files.items():
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            self.blobs[digest] = data
            layers.append(
                {"mediaType": media_type or "application/octet-stream", "digest": digest, "size": len(data)}
                | {"annotations": {key: name}}
            )
        return self.put({"schemaVersion": 2, "config": {}, "layers": layers}, tag)

    def put(self, manifest: Mapping[str, object], tag: str) -> str:
        data = json.dumps(manifest).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        self.tags[tag] = self.tags[digest] = data
        return digest

    def answer(self, request: Seen) -> Answer:
        url = urlsplit(request.path)
        if url.path == "/token":
            return self._give_token(request, parse_qs(url.query))
        given = request.headers.get("authorization", "")
        if self.auth == "bearer" and given != f"Bearer {self.token}":
            return Answer(b"", 401, {"WWW-Authenticate": f'Bearer realm="{self.url}/token",service="here"'})
        if self.auth == "basic" and given != self._basic:
            return Answer(b"", 401, {"WWW-Authenticate": 'Basic realm="here"'})
        kind, _, reference = url.path.removeprefix("/v2/team/model/").partition("/")
        found = (self.tags if kind == "manifests" else self.blobs).get(reference)
        if found is None:
            return Answer(b"", 404)
        return Answer(found, faults_as=kind if kind == "manifests" else reference)

    @property
    def _basic(self) -> str:
        return "Basic " + base64.b64encode(self.login.encode()).decode()

    def _give_token(self, request: Seen, query: Mapping[str, list[str]]) -> Answer:
        if self.login and request.headers.get("authorization") != self._basic:
            return Answer(b"", 401)
        assert query == {"scope": ["repository:team/model:pull"], "service": ["here"]}
        return Answer(json.dumps({"token": self.token}).encode())
