"""`http://host/folder` against servers on the loopback: one that knows ranges and tags, and Python's own."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.fakes.downloads import fast, run, visible
from tests.fakes.http_faults import Answer, Fault, FaultyServer, Seen
from tests.fakes.model_files import WANTED, safetensors, sharded

SHARD = "model-00001-of-00002.safetensors"


class WebServer(FaultyServer):
    """Files below /models/qwen; it lists nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, bytes] = sharded(300_000)
        self.missing = 404

    def answer(self, request: Seen) -> Answer:
        folder, _, name = request.path.rpartition("/")
        data = self.files.get(name) if folder == "/models/qwen" else None
        if data is None:
            return Answer(b"", self.missing)
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if request.headers.get("if-match", tag) != tag:
            return Answer(b"", 412)
        return Answer(data, headers={"ETag": tag}, faults_as=name if request.method == "GET" else "")


@pytest.fixture
def web() -> Iterator[WebServer]:
    with WebServer() as server:
        yield server


def uri(server: FaultyServer) -> str:
    return f"{server.url}/models/qwen/"


@pytest.mark.parametrize("missing", [404, 403])
def test_what_a_model_may_have_is_asked_for(web: WebServer, tmp_path: Path, missing: int) -> None:
    web.missing = missing
    web.faults[SHARD] = [Fault("ignore-range"), Fault("cut", after=100_000), Fault("status", status=503)]
    result = run(uri(web), tmp_path, fast())
    assert (result.reason, result.message) == ("", "")
    assert visible(tmp_path) == WANTED
    assert all((tmp_path / name).read_bytes() == web.files[name] for name in WANTED)
    web.seen.clear()
    assert run(uri(web), tmp_path, fast()) == result
    assert web.seen == []


def sums(files: dict[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items()).encode()


def test_sums_name_the_files_and_decide(web: WebServer, tmp_path: Path) -> None:
    web.files = {"config.json": web.files["config.json"], "extra.safetensors": safetensors(5000), "words.txt": b"a"}
    web.files["SHA256SUMS"] = sums(web.files)
    assert run(uri(web), tmp_path / "good", fast()).message == ""
    assert visible(tmp_path / "good") == {"config.json", "extra.safetensors", "words.txt"}
    web.files["words.txt"] = b"b"
    result = run(uri(web), tmp_path / "bad", fast())
    assert (result.reason, result.message.split()[0]) == ("ChecksumMismatch", "words.txt")
    assert visible(tmp_path / "bad") == set()
    del web.files["words.txt"]
    assert "lacks words.txt, which its SHA256SUMS names" in run(uri(web), tmp_path / "less", fast()).message
    web.files["SHA256SUMS"] = b"<html>"
    assert "has a line that sha256sum would not write" in run(uri(web), tmp_path / "none", fast()).message
    web.files["SHA256SUMS"] = sums({"../x": b""})
    assert "could lead out of the folder" in run(uri(web), tmp_path / "out", fast()).message


def test_a_file_that_is_replaced_meanwhile_is_not_mixed(web: WebServer, tmp_path: Path) -> None:
    class Replacing(WebServer):
        def answer(self, request: Seen) -> Answer:
            answer = super().answer(request)
            if request.method == "GET" and request.path.endswith(SHARD) and "range" not in request.headers:
                self.files = sharded(300_000, seed=1)
            return answer

    with Replacing() as server:
        server.faults[SHARD] = [Fault("ignore-range"), Fault("cut", after=100_000)]
        result = run(uri(server), tmp_path, fast())
    assert (result.reason, "was replaced while it was read" in result.message) == ("ChecksumMismatch", True)


@pytest.mark.parametrize(
    ("status", "reason", "says"),
    [
        (404, "ModelNotFound", "has neither SHA256SUMS nor config.json: give the URL of the folder"),
        (401, "AccessDenied", r"answers 401: put its user and password into ~/\.netrc"),
        (400, "BadSettings", "answers 400: is it the URL of a folder of files"),
        (503, "StoreUnreachable", "answers 503"),
    ],
)
def test_what_cannot_be_had(web: WebServer, tmp_path: Path, status: int, reason: str, says: str) -> None:
    web.files, web.missing = {}, status
    result = run(uri(web), tmp_path, fast())
    assert result.reason == reason
    assert re.search(says, result.message)


def test_a_server_without_ranges_will_do(tmp_path: Path) -> None:
    (tmp_path / "served").mkdir()
    for name, data in sharded().items():
        if "/" not in name:
            (tmp_path / "served" / name).write_bytes(data)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        result = run(f"http://127.0.0.1:{server.server_port}/served", tmp_path / "here", fast())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert result.message == ""
    assert visible(tmp_path / "here") == WANTED


def test_nobody_is_asked_for_a_revision(web: WebServer, tmp_path: Path) -> None:
    assert "revision is of a repository" in run(uri(web), tmp_path, fast(revision="v1")).message
    assert web.seen == []
