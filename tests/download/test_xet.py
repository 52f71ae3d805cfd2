"""Large files by Xet: from the well-known hub alone, verified like all others, and read over HTTP where it fails."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.file_download import get_hf_file_metadata, xet_get
from huggingface_hub.utils import _xet
from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter
from pagefleet_download.guarded_http import open_guarded
from pagefleet_download.hub import HubModel, HubSource
from pagefleet_download.manifest import InstalledFile
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import Digest, RemoteFile
from pagefleet_download.transfer import Transfer
from pagefleet_download.xet import LARGE, WELL_KNOWN_HUB, HubXet, _bar_class

from tests.fakes.downloads import fast, run
from tests.fakes.hub_server import HubServer
from tests.fakes.model_files import safetensors, sharded

BODY = safetensors(LARGE)
FILE = RemoteFile("model.safetensors", len(BODY), "t", Digest("sha256", hashlib.sha256(BODY).hexdigest()))


class Pieces:
    """Writes what it is told to, as hf-xet would."""

    def __init__(self, body: bytes = BODY, fails: bool = False, stored: bool = True) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.aborted = threading.Event()
        self._body, self._fails, self._stored = body, fails, stored

    def fetch(self, url: str, path: Path, size: int, token: str | None, add_bytes: Callable[[int], None]) -> bool:
        self.asked.append((url, token))
        if not self._stored:
            return False
        path.write_bytes(self._body)
        add_bytes(len(self._body))
        if self._fails:
            raise RuntimeError("CAS: no route to host\nmore for its makers")
        return True

    def abort(self) -> None:
        self.aborted.set()


class OverHttp(HubSource):
    """The well-known hub, whose plain HTTP is a fake: no test reaches the real one."""

    reads = 0

    async def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        OverHttp.reads += 1
        yield BODY[start:stop]


def transfer(tmp_path: Path, xet: Pieces | None, endpoint: str = WELL_KNOWN_HUB) -> tuple[InstalledFile, ProgressMeter]:
    meter, settings = ProgressMeter(), replace(fast(), xet=xet, token="hf_right")
    OverHttp.reads = 0

    async def work() -> InstalledFile:
        async with open_guarded(endpoint, {}) as http:
            source = OverHttp(HubModel("org/model", "c0ffee", endpoint, True), http, settings)
            return await Transfer(source, settings, meter).fetch(FILE, tmp_path / "part")

    return asyncio.run(work()), meter


def test_a_large_file_of_the_well_known_hub_comes_by_xet(tmp_path: Path) -> None:
    xet = Pieces()
    installed, meter = transfer(tmp_path, xet)
    assert (installed.size, OverHttp.reads) == (len(BODY), 0)
    assert xet.asked == [(f"{WELL_KNOWN_HUB}/org/model/resolve/c0ffee/model.safetensors", "hf_right")]
    assert (tmp_path / "part").read_bytes() == BODY
    assert meter.snapshot().bytes_done == len(BODY)
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize(
    "xet",
    [Pieces(fails=True), Pieces(stored=False), Pieces(body=b"x" + BODY[1:]), Pieces(body=BODY[:-1]), None],
    ids=["fails", "not stored so", "wrong bytes", "too short", "none"],
)
def test_otherwise_it_is_read_over_http(tmp_path: Path, xet: Pieces | None) -> None:
    installed, meter = transfer(tmp_path, xet)
    assert (installed.sha256, OverHttp.reads) == (FILE.digest and FILE.digest.hexdigest, 1)
    assert (tmp_path / "part").read_bytes() == BODY
    assert meter.snapshot().bytes_done == len(BODY)
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


@pytest.mark.parametrize("endpoint", ["https://mirror.example", "http://huggingface.co", "https://huggingface.co:8443"])
def test_no_other_hub_is_believed(tmp_path: Path, endpoint: str) -> None:
    xet = Pieces()
    transfer(tmp_path, xet, endpoint)
    assert xet.asked == []


def test_a_hub_that_announces_xet_gains_nothing(hub: HubServer, tmp_path: Path) -> None:
    xet = Pieces()
    hub.repositories["org/model"].commit(sharded(LARGE))
    assert run("hf://org/model", tmp_path, fast(endpoint=hub.url, xet=xet)).reason == ""
    assert xet.asked == []


@pytest.mark.parametrize("knows", [True, False])
def test_a_download_that_is_cancelled_has_it_abort(tmp_path: Path, knows: bool) -> None:
    began = threading.Event()

    class Endless(Pieces):
        def abort(self) -> None:
            super().abort()
            if not knows:
                raise ImportError("another version has no such function")

        def fetch(self, *_: Any, **__: Any) -> bool:
            began.set()
            assert self.aborted.wait(60)
            raise RuntimeError("aborted")

    xet = Endless()
    settings: DownloadSettings = replace(fast(), xet=xet)

    async def work() -> None:
        async with open_guarded(WELL_KNOWN_HUB, {}) as http:
            source = OverHttp(HubModel("org/model", "c0ffee", WELL_KNOWN_HUB, False), http, settings)
            task = asyncio.create_task(Transfer(source, settings, ProgressMeter()).fetch(FILE, tmp_path / "part"))
            await asyncio.to_thread(began.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(work())
    assert xet.aborted.is_set()
    assert list(tmp_path.iterdir()) == []


def test_the_library_has_what_is_asked_of_it() -> None:
    assert {"incomplete_path", "xet_file_data", "headers", "expected_size", "tqdm_class"} <= set(
        inspect.signature(xet_get).parameters
    )
    assert {"url", "token", "endpoint"} <= set(inspect.signature(get_hf_file_metadata).parameters)
    assert callable(_xet.abort_xet_session)
    HubXet().abort()


def test_its_progress_reaches_the_meter() -> None:
    class Report:
        total_bytes = 10
        total_bytes_completed = 0
        total_transfer_bytes_completed = 0
        total_bytes_completion_rate = total_transfer_bytes_completion_rate = None

    told: list[int] = []
    with XetDownloadProgressReporter(
        reconstruction_desc="file", total=10, log_level=30, tqdm_class=_bar_class(told.append)
    ) as reporter:
        for done, came in ((4, 3), (10, 5)):
            report = Report()
            report.total_bytes_completed, report.total_transfer_bytes_completed = done, came
            reporter.update_progress(report)
    assert told == [4, 6]
