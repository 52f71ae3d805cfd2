"""A router that picks endpoints, its programmed engines, and a gateway before them. No test in here."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.fakes.faulty_engine import Behaviour, Fleet, fleet
from tests.fakes.free_ports import free_ports
from tests.fakes.played_gateway import Gateway, gateway


@contextlib.asynccontextmanager
async def gated(
    folder: Path, *behaviours: Behaviour, of_gateway: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> AsyncIterator[tuple[Fleet, Gateway]]:
    """Start one engine per behaviour (all of model `m`), a router and a gateway."""
    picks = {"endpoint_picker_port": free_ports(), "endpoint_picker_tls": False}
    async with (
        fleet(folder, *behaviours, **{**picks, **settings}) as f,
        gateway(picks["endpoint_picker_port"], **of_gateway) as g,
    ):
        yield f, g


def addresses(f: Fleet) -> list[str]:
    """Return IP:PORT of each engine."""
    return [engine.url.removeprefix("http://") for engine in f.engines]


def in_flight(f: Fleet) -> list[int]:
    """Return what the router counts at each engine."""
    return [engine.tally.num_requests for engine in f.router.table.snapshot.engines]


def picks(f: Fleet) -> dict[str, int]:
    """Return what the picker counts."""
    assert f.router.gateways is not None
    return dict(f.router.gateways.picker.picks.outcomes)
