"""A model's way to this machine: what is asked of the store, how failures are told, and how the fleet waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.settings import DownloadSettings
from pagefleet_operator.local.backoff import Backoff
from pagefleet_operator.local.model_fetch import ModelFetch, ModelOrder, model_order
from pagefleet_protocol.model_facts import DownloadResult
from pagefleet_protocol.model_uri import parse_model_uri

HF = {"uri": "hf://org/name"}


class Store:
    """Downloads that end as they are told to, once they may."""

    def __init__(self, *results: DownloadResult) -> None:
        self.asked: list[tuple[str, Path, DownloadSettings]] = []
        self.open = asyncio.Event()
        self.reached = asyncio.Event()
        self._results = list(results)

    async def download(self, uri: str, folder: Path, settings: DownloadSettings, progress: ProgressMeter) -> Any:
        self.asked.append((uri, folder, settings))
        progress.begin("downloading")
        progress.expect(4 << 30, 2)
        progress.add_bytes(1 << 30)
        self.reached.set()
        await self.open.wait()
        return self._results.pop(0) if len(self._results) > 1 else self._results[0]


DONE = DownloadResult()
DENIED = DownloadResult(reason="AccessDenied", message="org/name is gated: give HF_TOKEN")
AWAY = DownloadResult(reason="StoreUnreachable", message="the hub does not answer")
ORDER = ModelOrder("hf://org/name", "v1", None, Path("/models/name"))


def fetch_of(store: Store, told: list[str], environment: dict[str, str] | None = None) -> ModelFetch:
    return ModelFetch(ORDER, store.download, environment or {}, Backoff(0.01, 0.02, lambda: 0.5), told.append)


def sentences(told: Sequence[str]) -> list[str]:
    return [text for text in told if text]


def test_the_order_and_the_environment_reach_the_store() -> None:
    async def scenario() -> None:
        store, told = Store(DONE), list[str]()
        store.open.set()
        fetch = fetch_of(store, told, {"HF_TOKEN": "secret", "HF_ENDPOINT": "https://mirror"})
        await fetch.run()
        ((uri, folder, settings),) = store.asked
        assert (uri, folder) == (ORDER.uri, ORDER.folder)
        assert (settings.revision, settings.token, settings.endpoint) == ("v1", "secret", "https://mirror")
        assert fetch.complete
        assert (fetch.verdict().holds, fetch.verdict().reason) == (True, "Cached")
        assert sentences(told) == ["the model is in /models/name"]

    asyncio.run(scenario())


def test_progress_is_seen_while_it_runs() -> None:
    async def scenario() -> None:
        store = Store(DONE)
        fetch = fetch_of(store, [])
        running = asyncio.create_task(fetch.run())
        await store.reached.wait()
        assert fetch.verdict().message == "this machine downloads the model: 25 %, 1.0 of 4.0 GiB, 0 of 2 files"
        assert not fetch.complete
        store.open.set()
        await running

    asyncio.run(scenario())


def test_what_may_pass_is_tried_again() -> None:
    async def scenario() -> None:
        store, told = Store(AWAY, AWAY, DONE), list[str]()
        store.open.set()
        fetch = fetch_of(store, told)
        await fetch.run()
        assert len(store.asked) == 3
        assert fetch.complete
        assert sentences(told)[0].startswith(
            "the model cannot be downloaded, StoreUnreachable: the hub does not answer; tried again in"
        )

    asyncio.run(scenario())


def test_what_somebody_has_to_change_is_not() -> None:
    async def scenario() -> None:
        store = Store(DENIED)
        store.open.set()
        fetch = fetch_of(store, [])
        await fetch.run()
        told = fetch.verdict()
        assert len(store.asked) == 1
        assert (told.holds, told.reason) == (False, "AccessDenied")
        assert told.message.endswith("give HF_TOKEN; correct it, then start pagefleet up again")

    asyncio.run(scenario())


def test_a_download_that_is_no_longer_wanted_is_given_up() -> None:
    async def scenario() -> None:
        store = Store(DONE)
        running = asyncio.create_task(fetch_of(store, []).run())
        await store.reached.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert len(asyncio.all_tasks()) <= 2

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "model", [{**HF, "revision": "v1"}, {**HF, "endpoint": "https://mirror"}, {"uri": "hf://org/other"}]
)
def test_each_wish_has_a_folder_of_its_own(build: Any, tmp_path: Path, model: dict[str, str]) -> None:
    def folder(**spec: Any) -> Path:
        service = build(**spec)
        order = model_order(service, parse_model_uri(service.spec.model.uri), tmp_path)
        assert order is not None
        return order.folder

    assert folder(model=model) != folder(model=HF)
    assert folder(model=model) == folder(model=model, replicas=2)
    assert folder(model=model).parent == tmp_path


def test_models_that_are_here_are_not_downloaded(build: Any, tmp_path: Path) -> None:
    for uri in ("builtin://tiny", "file:///models/a"):
        assert model_order(build(model={"uri": uri}), parse_model_uri(uri), tmp_path) is None


@pytest.mark.fleet
def test_engines_start_once_their_model_is_here(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        store = Store(DONE)
        async with start_fleet(document(model=HF), download=store.download) as fleet:
            await fleet.until(lambda: fleet.view() is not None and bool(store.asked))
            await fleet.until(lambda: fleet.condition("ModelCached").reason == "Downloading")
            assert fleet.condition("Ready").reason == "Downloading"
            assert "engine-0" not in fleet.states()
            store.open.set()
            await fleet.until(lambda: fleet.settled(1))
            assert (await fleet.ask())[1]["location"] == str(store.asked[0][1])
            assert fleet.condition("ModelCached").reason == "Cached"

    asyncio.run(scenario())


@pytest.mark.fleet
def test_the_model_before_serves_until_the_next_one_is_here(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        store = Store(DENIED, DONE)
        async with start_fleet(document(), download=store.download) as fleet:
            await fleet.until(lambda: fleet.settled(1))
            fleet.edit(document(model=HF))
            await fleet.until(lambda: bool(store.asked))
            store.open.set()
            await fleet.until(lambda: fleet.condition("ModelCached").reason == "AccessDenied")
            assert (await fleet.ask())[1]["location"] == "builtin://tiny"
            assert fleet.reporter.heard("qwen: the model cannot be downloaded, AccessDenied: org/name is gated")
            fleet.edit(document(model={**HF, "revision": "v2"}))
            await fleet.until(lambda: fleet.condition("ModelCached").reason == "Cached")
            await fleet.until(lambda: fleet.settled(1))
            assert (await fleet.ask())[1]["location"] == str(store.asked[1][1])

    asyncio.run(scenario())


@pytest.mark.fleet
def test_a_fleet_stops_while_it_downloads(start_fleet: Any, document: Any) -> None:
    async def scenario() -> None:
        store = Store(DONE)
        async with start_fleet(document(model=HF), download=store.download) as fleet:
            await fleet.until(lambda: bool(store.asked))
            fleet.fleet.stop()
            async with asyncio.timeout(60):
                assert await fleet.finished == 0

    asyncio.run(scenario())
