"""Builders of InferenceServices, and a fleet of fake processes for tests to put to the proof."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
import yaml
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.settings import DownloadSettings
from pagefleet_operator.local import machine
from pagefleet_operator.local.fleet import Fleet
from pagefleet_operator.local.model_fetch import Download
from pagefleet_operator.local.settings import Commands, LocalSettings, Timing
from pagefleet_operator.local.state_dir import StateDir
from pagefleet_operator.local.table import ServiceView
from pagefleet_operator.plan.verdict import find_condition
from pagefleet_protocol.inference_service import InferenceService
from pagefleet_protocol.inference_status import Condition, ConditionType
from pagefleet_protocol.model_facts import DownloadResult
from pagefleet_protocol.resource_documents import parse_inference_service

from tests.fakes.fleet_processes import recorded_pids
from tests.fakes.free_ports import free_ports
from tests.fakes.resource_documents import service_document

FAKES = Path(__file__).parents[1] / "fakes"


class Build(Protocol):
    def __call__(self, name: str = ..., **spec: Any) -> InferenceService: ...


class Document(Protocol):
    def __call__(self, name: str = ..., **spec: Any) -> dict[str, Any]: ...


@pytest.fixture
def document() -> Document:
    """Make an InferenceService as YAML would give it."""
    return service_document


@pytest.fixture
def build() -> Build:
    """Make an InferenceService with these fields of its spec."""

    def make(name: str = "qwen", **spec: Any) -> InferenceService:
        return parse_inference_service(service_document(name, **spec))

    return make


@pytest.fixture(scope="session")
def commands() -> Commands:
    """The programs of a fake fleet."""
    return Commands(
        serve=(sys.executable, "-S", str(FAKES / "engine_process.py")),
        route=(sys.executable, str(FAKES / "router_process.py")),
    )


@pytest.fixture(scope="session")
def quick() -> Timing:
    """Times for tests: a fleet's life in a second."""
    return Timing(
        probe_period=0.1,
        starting_probe_period=0.03,
        probe_timeout=10.0,
        ready_failures=2,
        live_failures=3,
        backoff_first=0.1,
        backoff_most=0.4,
        settle=0.2,
        kill_grace=10.0,
        pair_period=0.1,
        file_poll=0.05,
        resync=0.3,
    )


@dataclass(slots=True)
class Recorder:
    """A reporter that remembers."""

    said: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    views: Sequence[ServiceView] = ()
    wants_figures: bool = False

    def say(self, text: str) -> None:
        self.said.append(text)

    def log(self, instance: str, line: str) -> None:
        self.logged.append(f"{instance} | {line}")

    def show(self, services: Sequence[ServiceView]) -> None:
        self.views = services

    def close(self) -> None:
        """Nothing is held back."""

    def heard(self, words: str) -> bool:
        return any(words in text for text in self.said)


@dataclass(slots=True)
class RunningFleet:
    """A fleet in this event loop, and what tests ask of it."""

    manifest: Path
    state_dir: Path
    reporter: Recorder
    fleet: Fleet
    finished: asyncio.Task[int]

    def edit(self, *documents: dict[str, Any]) -> None:
        """Replace the manifest's text as editors do."""
        part = self.manifest.with_suffix(".part")
        part.write_text(yaml.safe_dump_all(documents))
        part.replace(self.manifest)

    async def until(self, condition: Callable[[], bool], timeout_s: float = 300.0) -> None:
        """Wait for something to become true; fail with what was said when it does not."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    if self.finished.done():
                        self.finished.result()
                        raise AssertionError("the fleet ended: " + "\n".join(self.reporter.said))
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError("did not happen; said:\n" + "\n".join(self.reporter.said)) from None

    def view(self, service: str = "qwen") -> ServiceView | None:
        return next((view for view in self.reporter.views if view.name == service), None)

    def condition(self, kind: ConditionType, service: str = "qwen") -> Condition:
        """Return a condition of the service's last status."""
        view = self.view(service)
        found = find_condition(view.status if view else None, kind)
        assert found is not None
        return found

    def states(self, service: str = "qwen") -> dict[str, str]:
        """Return the state of each instance by its name without the service's."""
        view = self.view(service)
        return {name.removeprefix(f"{service}-"): one.state.value for name, one in view.instances} if view else {}

    def settled(self, engines: int, service: str = "qwen") -> bool:
        """Whether so many engines of one revision serve and nothing is under way."""
        view = self.view(service)
        if (
            view is None
            or view.status is None
            or any(one.status == "False" for one in view.status.conditions if one.type == "Ready")
        ):
            return False
        quiet = all(one.reason == "Settled" for one in view.status.conditions if one.type == "Progressing")
        return quiet and sum(not name.startswith(f"{service}-router") for name, _ in view.instances) == engines

    def url(self, service: str = "qwen") -> str:
        view = self.view(service)
        assert view is not None
        assert view.status is not None
        assert view.status.url is not None
        return view.status.url

    async def ask(self, service: str = "qwen", path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
        """Send one request through the service's router."""
        return await ask(self.url(service) + path)

    def pids(self) -> list[int]:
        """Return the processes that the fleet has on record."""
        return list(recorded_pids(self.state_dir).values())


async def ask(url: str) -> tuple[int, dict[str, Any]]:
    host, _, path = url.removeprefix("http://").partition("/")
    address, port = host.split(":")
    reader, writer = await asyncio.open_connection(address, int(port))
    try:
        writer.write(f"POST /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 0\r\n\r\n".encode())
        reply = await reader.read()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    head, _, body = reply.partition(b"\r\n\r\n")
    if not head:
        raise ConnectionError("no answer")
    return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {"text": body.decode()}


async def no_download(uri: str, folder: Path, settings: DownloadSettings, progress: ProgressMeter) -> DownloadResult:
    raise AssertionError(f"{uri} is to be downloaded to {folder}")


StartFleet = Callable[..., AbstractAsyncContextManager[RunningFleet]]


def own_row(host: str, count: int, taken: Iterable[int] = ()) -> range:
    first = free_ports(count)
    return range(first, first + count)


@pytest.fixture
def start_fleet(tmp_path: Path, commands: Commands, quick: Timing, monkeypatch: pytest.MonkeyPatch) -> StartFleet:
    """Return what runs a fleet of fake processes for the length of an `async with`."""
    # Fleets of tests side by side would now and then draw one port, which is listened on later.
    monkeypatch.setattr(machine, "free_row", own_row)

    @contextlib.asynccontextmanager
    async def start(
        *documents: dict[str, Any],
        timing: Timing = quick,
        port: int = 0,
        gpus: Sequence[str] = (),
        download: Download = no_download,
    ) -> AsyncIterator[RunningFleet]:
        manifest, state_dir, reporter = tmp_path / "fleet.yaml", tmp_path / "state", Recorder()
        manifest.write_text(yaml.safe_dump_all(documents))
        settings = LocalSettings(
            manifest=manifest,
            state_dir=state_dir,
            models_dir=tmp_path / "models",
            commands=commands,
            download=download,
            port=port,
            timing=timing,
        )
        with StateDir(state_dir) as state:
            fleet = Fleet(settings, state, reporter, gpus)
            running = RunningFleet(manifest, state_dir, reporter, fleet, asyncio.create_task(fleet.run()))
            try:
                yield running
            finally:
                fleet.stop()
                fleet.stop()
                await asyncio.wait({running.finished})

    return start
