"""A small model, and engines that serve it and pass each other its K/V."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.kv_engines import Fleet, running_fleet
from tests.fakes.small_model import write_small_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "fleet-key"
    file.write_bytes(b"k" * 32)
    return file


@pytest.fixture
def fleet(model: Path, key_file: Path) -> Iterator[Fleet]:
    with running_fleet(model, key_file) as fleet:
        yield fleet
