from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.chat_server import Script, chat_server


@pytest.fixture
def server() -> Iterator[Script]:
    with chat_server() as script:
        yield script
