"""What went wrong lately, in words and with what to do: for people who look, beside the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pagefleet_protocol.console_state import MAX_NOTES, FaultState


@dataclass(frozen=True, slots=True)
class FaultKind:
    """One thing that can go wrong."""

    what: str
    """A sentence; `{engine}` stands for the engine's name, `{detail}` for what is known besides."""
    remedy: str
    """What to do, a sentence."""


class FaultBook:
    """Keeps the newest faults; what happens again is counted, so that a flood hides nothing.

    Args:
        wall_clock: seconds since the epoch.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._entries: dict[tuple[FaultKind, str | None, str], tuple[float, int]] = {}
        """When it last happened and how often, in the order of that."""

    def note(self, kind: FaultKind, engine: str | None = None, detail: str = "", count: int = 1) -> None:
        """Note that something went wrong, `count` times."""
        key = (kind, engine, detail)
        _, before = self._entries.pop(key, (0.0, 0))
        self._entries[key] = (self._wall_clock(), before + count)
        if len(self._entries) > MAX_NOTES:
            del self._entries[next(iter(self._entries))]

    def states(self) -> tuple[FaultState, ...]:
        """Return them, newest first."""
        return tuple(
            FaultState(
                at=shown_time(at),
                what=kind.what.format(engine=engine, detail=detail),
                remedy=kind.remedy,
                engine=engine,
                count=count,
            )
            for (kind, engine, detail), (at, count) in reversed(self._entries.items())
        )


def shown_time(seconds: float) -> str:
    """Return a time of the wall clock as RFC 3339 in UTC, to a millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
