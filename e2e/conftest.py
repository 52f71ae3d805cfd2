"""One fleet of two engines for the whole session: each test finds it serving, and leaves it able to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from e2e.fleet_process import FleetProcess
from tiny.dataset import Exchange, load_knowledge


@pytest.fixture(scope="session")
def exchanges() -> Sequence[Exchange]:
    """All that the embedded model knows by heart."""
    return tuple(load_knowledge().exchanges())


@pytest.fixture(scope="session")
def session_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    with FleetProcess(tmp_path_factory.mktemp("fleet"), replicas=2) as fleet:
        yield fleet


@pytest.fixture
def fleet(session_fleet: FleetProcess) -> FleetProcess:
    """Two engines behind a router, all ready."""
    session_fleet.edit(replicas=2)
    session_fleet.until(lambda: session_fleet.serves(2))
    return session_fleet
