"""One fleet of two engines for all of e2e/: each test finds it serving, and leaves it able to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from e2e.fleet_process import FleetProcess
from tiny.dataset import Exchange, load_knowledge


@pytest.fixture(scope="session")
def exchanges() -> Sequence[Exchange]:
    """All that the embedded model knows by heart."""
    return tuple(load_knowledge().exchanges())


@pytest.fixture(scope="package")  # it ends with e2e/: an idle fleet takes its part of two cores
def shared_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetProcess]:
    with FleetProcess(tmp_path_factory.mktemp("fleet"), replicas=2) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared_fleet: FleetProcess) -> FleetProcess:
    """Two engines behind a router, all ready."""
    shared_fleet.edit(replicas=2)
    shared_fleet.until(lambda: shared_fleet.serves(2))
    return shared_fleet
