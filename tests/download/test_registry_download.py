"""`oci://registry/repository:tag` against a registry on the loopback."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from tests.fakes.downloads import fast, run, visible
from tests.fakes.http_faults import Answer, Fault, Seen
from tests.fakes.model_files import WANTED, sharded
from tests.fakes.registry_server import RegistryServer

SHARD = "model-00001-of-00002.safetensors"
FILES = {name: data for name, data in sharded(300_000).items() if "/" not in name}


@pytest.fixture
def registry() -> Iterator[RegistryServer]:
    with RegistryServer() as server:
        server.push(FILES)
        yield server


def blob(name: str) -> str:
    return f"sha256:{hashlib.sha256(FILES[name]).hexdigest()}"


@pytest.mark.parametrize("key", ["org.opencontainers.image.title", "org.cncf.model.filepath"])
def test_the_files_of_an_artifact_arrive(registry: RegistryServer, tmp_path: Path, key: str) -> None:
    registry.push(FILES, key=key)
    registry.faults[blob(SHARD)] = [Fault("ignore-range"), Fault("cut", after=100_000), Fault("corrupt", after=7)]
    result = run(f"oci://{registry.name}:v1", tmp_path, fast())
    assert (result.reason, result.message) == ("", "")
    assert visible(tmp_path) == WANTED
    assert all((tmp_path / name).read_bytes() == FILES[name] for name in WANTED)
    assert result.facts is not None
    assert result.facts.revision == hashlib.sha256(registry.tags["v1"]).hexdigest()[:40]


def test_a_digest_is_what_it_says(registry: RegistryServer, tmp_path: Path) -> None:
    digest = registry.push(FILES)
    registry.push({**FILES, "more.json": b"{}"})
    assert run(f"oci://{registry.name}:v1@{digest}", tmp_path / "a", fast()).message == ""
    assert visible(tmp_path / "a") == WANTED
    registry.tags[digest] += b" "
    result = run(f"oci://{registry.name}@{digest}", tmp_path / "b", fast())
    assert (result.reason, "has another manifest than sha256:" in result.message) == ("ChecksumMismatch", True)


def log_in(registry: RegistryServer, folder: Path, account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    auth = base64.b64encode(account.encode()).decode()
    host = registry.name.partition("/")[0]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}, "credsStore": "x"}))


@pytest.mark.parametrize("auth", ["bearer", "basic"])
def test_an_account_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auth: str) -> None:
    with RegistryServer(auth, "me:right") as server:
        server.push(FILES)
        log_in(server, tmp_path / "docker", "me:right", monkeypatch)
        assert run(f"oci://{server.name}:v1", tmp_path / "a", fast()).message == ""
        for account in ("me:wrong", ""):
            log_in(server, tmp_path / "docker", account, monkeypatch)
            result = run(f"oci://{server.name}:v1", tmp_path / "b", fast())
            assert result.reason == "AccessDenied"
            assert "refuses to give v1: `docker login` or `oras login` first" in result.message


def test_a_token_that_expires_is_got_again(tmp_path: Path) -> None:
    class Expiring(RegistryServer):
        def answer(self, request: Seen) -> Answer:
            if "/blobs/" in request.path and request.headers.get("authorization") == "Bearer first":
                self.token = "second"
            return super().answer(request)

    with Expiring("bearer") as server:
        server.push(FILES)
        assert run(f"oci://{server.name}:v1", tmp_path, fast()).message == ""
        assert len(server.requests_for("/token")) >= 2
    assert visible(tmp_path) == WANTED


def test_the_login_goes_to_who_was_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Redirecting(RegistryServer):
        def answer(self, request: Seen) -> Answer:
            if request.path.startswith("/token"):
                return Answer(b"", 302, {"Location": f"{other.url}{request.path}"})
            return super().answer(request)

    with RegistryServer() as other, Redirecting("bearer", "me:right") as server:
        server.push(FILES)
        log_in(server, tmp_path / "docker", "me:right", monkeypatch)
        run(f"oci://{server.name}:v1", tmp_path / "a", fast())
        assert ["authorization" in seen.headers for seen in server.requests_for("/token")] == [True]
        assert ["authorization" in seen.headers for seen in other.requests_for("/token")] == [False]


def test_nobody_else_says_where_the_login_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Redirecting(RegistryServer):
        def answer(self, request: Seen) -> Answer:
            return Answer(b"", 302, {"Location": f"{other.url}{request.path}"})

    with RegistryServer("bearer") as other, Redirecting() as server:
        log_in(server, tmp_path / "docker", "me:right", monkeypatch)
        assert run(f"oci://{server.name}:v1", tmp_path / "a", fast()).reason == "AccessDenied"
        assert (len(other.requests_for("/manifests/")), other.requests_for("/token")) == (1, [])


def test_a_token_is_asked_for_as_the_registry_says(tmp_path: Path) -> None:
    class Mirror(RegistryServer):
        def answer(self, request: Seen) -> Answer:
            if request.path.startswith("/token"):
                asked.append(dict(parse_qsl(urlsplit(request.path).query)))
                return Answer(json.dumps({"token": self.token}).encode())
            if "authorization" in request.headers:
                return super().answer(request)
            said = f'Bearer realm="{self.url}/token?a=b",service="here",scope="repository:mirror/team/model:pull"'
            return Answer(b"", 401, {"WWW-Authenticate": said})

    asked: list[dict[str, str]] = []
    with Mirror() as server:
        server.push(FILES)
        assert run(f"oci://{server.name}:v1", tmp_path / "a", fast()).message == ""
    assert asked[0] == {"a": "b", "service": "here", "scope": "repository:mirror/team/model:pull"}


@pytest.mark.parametrize("auth", ["\u00e9", "===", "a"])
def test_a_login_that_is_none_is_left_out(
    registry: RegistryServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, auth: str
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.name.partition("/")[0]: {"auth": auth}}}))
    assert run(f"oci://{registry.name}:v1", tmp_path / "a", fast()).message == ""


def test_a_public_registry_names_no_private_place(tmp_path: Path) -> None:
    class Elsewhere(RegistryServer):
        def answer(self, request: Seen) -> Answer:
            return Answer(b"", 401, {"WWW-Authenticate": 'Bearer realm="ftp://10.0.0.1/token"'})

    with Elsewhere() as server:
        result = run(f"oci://{server.name}:v1", tmp_path, fast())
    assert (result.reason, "to ftp://" in result.message) == ("BadSettings", True)


@pytest.mark.parametrize(
    ("manifest", "reason", "says"),
    [
        ({"layers": []}, "BadModel", "is an image, whose layers are archives, which a cluster mounts: push the files"),
        ({"manifests": []}, "BadModel", "is an index of images: give the digest of one of its manifests"),
        ({"layers": 3}, "BadSettings", "does not answer as a registry does"),
        (
            {"layers": [{"digest": "md5:1", "size": 1, "annotations": {"org.opencontainers.image.title": "a"}}]},
            *("BadModel", "an image"),
        ),
    ],
)
def test_what_is_no_artifact(
    registry: RegistryServer, tmp_path: Path, manifest: dict[str, object], reason: str, says: str
) -> None:
    registry.put(manifest, "v2")
    result = run(f"oci://{registry.name}:v2", tmp_path, fast())
    assert result.reason == reason
    assert says in result.message


def test_archives_are_no_files(registry: RegistryServer, tmp_path: Path) -> None:
    registry.push(FILES, media_type="application/vnd.oci.image.layer.v1.tar+gzip")
    assert run(f"oci://{registry.name}:v1", tmp_path, fast()).reason == "BadModel"


def test_what_is_not_there(registry: RegistryServer, tmp_path: Path) -> None:
    result = run(f"oci://{registry.name}", tmp_path, fast())
    assert result.reason == "ModelNotFound"
    assert re.search("team/model has no latest: check repository and tag", result.message)
    registry.faults["manifests"] = [Fault("status", status=503)] * 2
    assert run(f"oci://{registry.name}:v1", tmp_path, fast()).message == ""
