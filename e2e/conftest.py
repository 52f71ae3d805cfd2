"""One fleet of two engines for all of e2e/: each test finds it serving, and leaves it able to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.fleet_process import FleetProcess
from tiny.dataset import Exchange, load_knowledge

_FLEET = pytest.StashKey[FleetProcess]()


@pytest.fixture(scope="session")
def exchanges() -> Sequence[Exchange]:
    """All that the embedded model knows by heart."""
    return tuple(load_knowledge().exchanges())


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FleetProcess:
    """Two engines behind a router, all ready. It ends with this folder's tests: it would compute beside all others."""
    folder = next(node for node in request.node.iter_parents() if node.path == Path(__file__).parent)
    if _FLEET not in folder.stash:
        with ExitStack() as stack:
            folder.stash[_FLEET] = stack.enter_context(FleetProcess(tmp_path_factory.mktemp("fleet"), replicas=2))
            stack.callback(folder.stash.__delitem__, _FLEET)
            folder.addfinalizer(stack.pop_all().close)
    shared: FleetProcess = folder.stash[_FLEET]
    shared.edit(replicas=2)
    shared.until(lambda: shared.serves(2))
    return shared
