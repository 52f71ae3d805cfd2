"""`modelscope://organization/name` against a server on the loopback that answers as ModelScope does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pagefleet_download.settings import settings_for

from tests.fakes.downloads import fast, run, visible
from tests.fakes.http_faults import Answer, Fault
from tests.fakes.model_files import WANTED, sharded
from tests.fakes.modelscope_server import ModelScopeServer

URI = "modelscope://org/model"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def scope() -> Iterator[ModelScopeServer]:
    with ModelScopeServer() as server:
        server.commit(sharded(300_000))
        yield server


def test_the_files_arrive_with_the_digests_that_are_told(scope: ModelScopeServer, tmp_path: Path) -> None:
    scope.faults[SHARD] = [Fault("ignore-range"), Fault("cut", after=100_000), Fault("corrupt", after=7)]
    result = run(URI, tmp_path, fast(endpoint=scope.url))
    assert (result.reason, result.message) == ("", "")
    assert visible(tmp_path) == WANTED
    assert all((tmp_path / name).read_bytes() == data for name, data in sharded(300_000).items() if name in WANTED)
    assert result.facts is not None
    assert (len(result.facts.revision), result.facts.weights_bytes) == (40, 600_001)


def test_a_branch_that_moves_while_it_is_read_changes_nothing(tmp_path: Path) -> None:
    files = sharded(300_000)

    class Moving(ModelScopeServer):
        def listing(self, revision: str) -> Answer:
            answer = super().listing(revision)
            self.commit({**files, SHARD: b"x" + files[SHARD][1:]})
            return answer

    with Moving() as server:
        server.commit(files)
        assert run(URI, tmp_path, fast(endpoint=server.url)).message == ""
    assert (tmp_path / SHARD).read_bytes() == files[SHARD]


def test_each_revision_is_what_was_asked_for(scope: ModelScopeServer, tmp_path: Path) -> None:
    scope.commit(sharded(300_000, seed=1), "v1")
    facts = [
        run(URI, tmp_path / str(revision), fast(endpoint=scope.url, revision=revision)).facts
        for revision in (None, "v1")
    ]
    assert facts[0] is not None
    assert facts[1] is not None
    assert facts[0].revision != facts[1].revision
    assert (tmp_path / "v1" / SHARD).read_bytes() == sharded(300_000, seed=1)[SHARD]


@pytest.mark.parametrize(
    ("revision", "uri", "says"),
    [
        ("v9", URI, "org/model at v9 does not exist on .*: check name and revision"),
        (None, "modelscope://org/other", "org/other at master does not exist .*MODELSCOPE_API_TOKEN"),
    ],
)
def test_what_is_not_there(scope: ModelScopeServer, tmp_path: Path, revision: str | None, uri: str, says: str) -> None:
    result = run(uri, tmp_path, fast(endpoint=scope.url, revision=revision))
    assert result.reason == "ModelNotFound"
    assert re.search(says, result.message)


def test_a_private_model_needs_the_token(tmp_path: Path) -> None:
    with ModelScopeServer("ms-right") as server:
        server.commit(sharded())
        environment = {"MODELSCOPE_DOMAIN": server.url, "HF_TOKEN": "of another"}
        settings = settings_for(URI, None, None, environment)
        assert (settings.token, settings.endpoint) == (None, server.url)
        assert run(URI, tmp_path, settings).reason == "ModelNotFound"
        known = settings_for(URI, None, None, {**environment, "MODELSCOPE_API_TOKEN": "ms-right\n"})
        assert run(URI, tmp_path, known).message == ""
    bad = settings_for(URI, None, None, {"MODELSCOPE_API_TOKEN": "a b"})
    assert "MODELSCOPE_API_TOKEN holds more than a token" in run(URI, tmp_path / "x", bad).message


def test_who_answers_otherwise_is_no_modelscope(tmp_path: Path) -> None:
    class Strange(ModelScopeServer):
        def listing(self, revision: str) -> Answer:
            return Answer(b"<html>")

    with Strange() as server:
        result = run(URI, tmp_path, fast(endpoint=server.url))
    assert (result.reason, "does not answer as ModelScope does" in result.message) == ("BadSettings", True)
