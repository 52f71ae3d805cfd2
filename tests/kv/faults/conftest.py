"""One pair of engines for all that can go wrong between them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.kv_pair import Pair


@pytest.fixture(scope="session")
def session_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("pair"))
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture
def pair(session_pair: Pair) -> Pair:
    """Both engines alive, over a good network."""
    session_pair.repair()
    return session_pair
