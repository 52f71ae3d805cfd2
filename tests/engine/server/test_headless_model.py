"""A machine without a server brings the commit of the model that its leader has."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
from pagefleet_engine.errors import EngineError
from pagefleet_engine.nodes.followers import Followers
from pagefleet_engine.server.headless import LeadersCommit, bring_model
from pagefleet_engine.server.loading import Loading
from pagefleet_engine.settings import engine_config

from tests.fakes.hub_server import HubServer, tiny_hub


class Told:
    """A follower that notes what it is told."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.error: EngineError | None = None

    def bring(self, folder: Path) -> None:
        self.folder = folder

    def give_up(self, error: EngineError) -> None:
        self.error = error


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with tiny_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield server


def brought(model: str, *commits: str | None) -> Told:
    async def bring() -> Told:
        follower, leaders = Told(), LeadersCommit()
        config = engine_config({"model": model, "device": "cpu"})
        working = asyncio.create_task(bring_model(config, cast("Followers", follower), Loading(), leaders))
        for commit in commits:  # as a follower tells it: from its own thread, after each connection
            await asyncio.to_thread(leaders.told, commit)
        await working
        return follower

    return asyncio.run(bring())


def test_a_branch_that_has_moved_since_is_what_it_is_at_the_leader(hub: HubServer) -> None:
    repository = hub.repositories["org/tiny"]
    before = repository.branches["main"]
    now = repository.commit({**repository.commits[before], "README.md": b"new", "added.json": b"{}"})
    told = brought("org/tiny", before, before)
    assert told.folder is not None
    assert told.folder.name == before != now
    assert not (told.folder / "added.json").exists()
    hub.seen.clear()
    again = brought("org/tiny", now)
    assert again.folder is not None
    assert again.folder.name == now
    assert hub.seen == []


def test_a_folder_stays_what_it_is(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert brought(str(tmp_path), "0" * 40).folder == tmp_path
    assert brought(str(tmp_path), None).folder == tmp_path
    assert hub.seen == []


def test_a_commit_that_cannot_be_had_ends_it(hub: HubServer) -> None:
    told = brought("org/tiny", "0" * 40)
    assert told.folder is None
    assert "has no revision 000" in str(told.error)
    assert os.environ["HF_ENDPOINT"] == hub.url
