"""The description of the API, and the fleet's view, as a real engine's server gives them to a browser."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from pagefleet_engine.config import ServerConfig

from tests.engine.server.conftest import MODEL, LiveServer
from tests.fakes.chromium import Chromium


@pytest.fixture(scope="module")
def engine() -> Iterator[LiveServer]:
    server = LiveServer(ServerConfig())
    yield server
    server.stop()


def test_the_api_is_shown_route_by_route(chromium: Chromium, engine: LiveServer) -> None:
    with chromium.page(engine.url + "/docs") as page:
        page.wait("document.querySelectorAll('.api details').length > 10")
        assert page.run("document.querySelector('.api summary code').textContent") == "GET /v1/models"
        opened = (
            "[...document.querySelectorAll('.api details')].find((one) => one.textContent.includes('/v1/chat/comp'))"
        )
        page.run(f"{opened}.open = true")
        text = page.run(f"{opened}.innerText")
        assert "temperature" in text
        assert "integer, from 1, to 128" in text


def test_an_engine_alone_shows_itself(chromium: Chromium, engine: LiveServer) -> None:
    with chromium.page(engine.url + "/#fleet") as page:
        page.wait(f"document.body.innerText.includes({socket.gethostname()!r})")
        assert MODEL in page.text()
