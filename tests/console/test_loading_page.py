"""The page of a real engine that still downloads and loads its model: bars, and then the chat, without a reload."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.chromium import Chromium
from tests.fakes.free_ports import free_ports
from tests.fakes.http_faults import Fault
from tests.fakes.hub_server import HubServer, tiny_hub

FLAGS = ("--num-kv-blocks", "64", "--max-model-len", "512", "--num-threads", "1")
PATIENCE_S = 300.0

pytestmark = pytest.mark.fleet


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with tiny_hub() as server:
        server.faults["model.safetensors"] = [Fault("stall", after=300_000)]
        yield server


@pytest.fixture
def engine(hub: HubServer, tmp_path: Path) -> Iterator[str]:
    """Serve a model of the hub; the URL answers."""
    port = free_ports()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pagefleet_engine.cli", "org/tiny", "--port", str(port), *FLAGS]
    with (tmp_path / "engine.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline, (tmp_path / "engine.log").read_text()
        try:
            httpx.get(f"{url}/livez")
            break
        except httpx.TransportError:
            time.sleep(0.02)
    yield url
    process.terminate()
    assert process.wait(PATIENCE_S) == 0


def test_it_shows_how_far_the_engine_is_and_then_chats(hub: HubServer, chromium: Chromium, engine: str) -> None:
    with chromium.page(f"{engine}/#fleet") as page:
        page.wait("/^loading [1-9]/.test(document.querySelector('[data-phase=\"loading\"]')?.textContent)")
        assert "downloads the model: " in page.text()
        assert "0 of 1 ready" in page.text("#health")
        assert httpx.get(f"{engine}/livez", timeout=60).status_code == 200
        hub.release()
        page.wait("document.querySelector('#health').textContent.includes('1 of 1 ready')")
        page.run("location.hash = '#chat'")
        page.wait("document.querySelector('.welcome h1')?.textContent.includes('tiny')")
        page.type("What is a KV cache?")
        page.press("Enter")
        page.wait("document.querySelector('.answer > .prose')?.textContent.includes('keys and values')")
