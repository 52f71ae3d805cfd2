"""The few answers of the Hugging Face Hub that a download needs. Content of weights comes from a second host, as there.

Source: the documentation of the Hub's API, and the headers that huggingface_hub reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

from pagefleet_engine.builtin import builtin_model_path

from tests.fakes.http_faults import Answer, FaultyServer, Seen

SIGNATURE = "X-Amz-Credential=a%2Fb%2Bc&name=%27%7E%27&Signature=s~"
"""Holds only for the very letters it was made of."""
_LARGE = (".safetensors", ".bin", "tokenizer.json")
"""What the hub keeps outside of git."""


@dataclass
class Repository:
    """Files by commit, and what branches and tags point at."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit to a branch. Returns its name."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha


class HubServer(FaultyServer):
    """Repositories for the account of `token`, and for nobody where they are gated or private.

    `redirects` are answers to a path's last part before all else: Location headers.

    With `content_host`, weights are answered by a redirect to that server. Without `sizes` it is a poor mirror.
    """

    def __init__(self, token: str = "hf_right", content_host: ContentServer | None = None, sizes: bool = True) -> None:
        super().__init__()
        self.repositories: dict[str, Repository] = {}
        self.redirects: dict[str, str] = {}
        self._token = token
        self._content_host = content_host
        self._sizes = sizes

    def answer(self, request: Seen) -> Answer:
        url = urlsplit(request.path)
        parts = [unquote(part) for part in url.path.split("/")[1:]]
        if parts[-1] in self.redirects:
            return Answer(b"", 302, {"Location": self.redirects[parts[-1]]})
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            return self._model_info(request, parts, "blobs" in parse_qs(url.query))
        if len(parts) >= 5 and parts[2] == "resolve":
            return self._file(request, "/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return Answer(b"no such page", 404)

    def _model_info(self, request: Seen, parts: list[str], with_sizes: bool) -> Answer:
        name = "/".join(parts[2:4])
        found = self._find(request, name, parts[5] if len(parts) > 5 else "main")
        if isinstance(found, Answer):
            return found
        files, sha = found
        siblings = [_sibling(file, data, with_sizes and self._sizes) for file, data in files.items()]
        body = json.dumps({"id": name, "modelId": name, "sha": sha, "siblings": siblings, "tags": [], "private": False})
        return Answer(body.encode(), headers={"Content-Type": "application/json"}, faults_as="list")

    def _file(self, request: Seen, repository: str, revision: str, name: str) -> Answer:
        found = self._find(request, repository, revision)
        if isinstance(found, Answer):
            return found
        data = found[0].get(name)
        if data is None:
            return Answer(b"", 404, {"X-Error-Code": "EntryNotFound"})
        if self.repositories[repository].gated and not self._is_known(request):
            return Answer(b"", 401, {"X-Error-Code": "GatedRepo"})
        if self._content_host and name.endswith(".safetensors"):
            place = f"/{name}?{SIGNATURE}"
            self._content_host.contents[place] = data
            return Answer(b"", 302, {"Location": f"{self._content_host.url}{place}"})
        about = {"X-Repo-Commit": found[1], "ETag": f'"{_tag(name, data)}"'}
        return Answer(data, headers=about, faults_as=name)

    def _find(self, request: Seen, name: str, revision: str) -> tuple[dict[str, bytes], str] | Answer:
        repository = self.repositories.get(name)
        if "authorization" in request.headers and not self._is_known(request):
            return Answer(b"", 401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if repository is None or (repository.private and not self._is_known(request)):
            return Answer(b"", 401, {"X-Error-Code": "RepoNotFound"})
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            return Answer(b"", 404, {"X-Error-Code": "RevisionNotFound"})
        return repository.commits[sha], sha

    def _is_known(self, request: Seen) -> bool:
        return request.headers.get("authorization") == f"Bearer {self._token}"


class ContentServer(FaultyServer):
    """Where the hub sends those who want large files."""

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[str, bytes] = {}

    def answer(self, request: Seen) -> Answer:
        data = self.contents.get(request.path)
        return Answer(data) if data is not None else Answer(b"the signature is of another URL", 403)


def tiny_hub() -> HubServer:
    """Return a hub that has the embedded model as org/tiny."""
    hub = HubServer()
    files = (file for file in builtin_model_path("tiny").iterdir() if file.is_file())
    hub.repositories["org/tiny"] = Repository()
    hub.repositories["org/tiny"].commit({file.name: file.read_bytes() for file in files})
    return hub


def _sibling(name: str, data: bytes, with_sizes: bool) -> dict[str, object]:
    if not with_sizes:
        return {"rfilename": name}
    about: dict[str, object] = {"rfilename": name, "size": len(data), "blobId": _git_name(data)}
    if name.endswith(_LARGE):
        about["lfs"] = {"sha256": _tag(name, data), "size": len(data), "pointerSize": 134}
    return about


def _tag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if name.endswith(_LARGE) else _git_name(data)


def _git_name(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
