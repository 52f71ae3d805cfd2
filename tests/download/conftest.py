"""Stores on the loopback that have a tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.hub_server import HubServer, Repository
from tests.fakes.model_files import sharded
from tests.fakes.object_store import ObjectStoreServer


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.repositories["org/model"] = Repository()
        yield server


@pytest.fixture
def store() -> Iterator[ObjectStoreServer]:
    with ObjectStoreServer() as server:
        server.buckets["models"] = {f"team/qwen/{name}": data for name, data in sharded().items()}
        yield server
