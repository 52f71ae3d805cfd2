"""One Chromium for the tests of a file, and a server of its own for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.chromium import Chromium, opened_chromium
from tests.fakes.console_server import ConsoleServer


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    yield from opened_chromium(tmp_path_factory.mktemp("chromium"))


@pytest.fixture
def server() -> Iterator[ConsoleServer]:
    console = ConsoleServer()
    console.start()
    yield console
    console.stop()
