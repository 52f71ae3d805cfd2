"""Which engine a session belongs to: rendezvous hashing (Thaler and Ravishankar, 1996).

Every router comes to the same answer without talking to others, and an engine that comes or goes moves only its share.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from pagefleet_router.endpoints import EngineView

_MASK = 2**64 - 1


def weight(session: int, engine_id: str) -> int:
    """Return a number that looks random, and is the same in every process."""
    mixed = (session ^ zlib.crc32(engine_id.encode()) * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK  # the finalizer of splitmix64
    mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & _MASK
    return mixed ^ mixed >> 31


def ranked(session: int, engines: Sequence[EngineView]) -> list[EngineView]:
    """Return the engines in the order in which a session tries them."""
    return sorted(engines, key=lambda engine: weight(session, engine.id), reverse=True)


def home(session: int, engines: Sequence[EngineView]) -> EngineView:
    """Return the first of `ranked`."""
    return max(engines, key=lambda engine: weight(session, engine.id))
