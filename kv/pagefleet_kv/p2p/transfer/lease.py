"""How long P keeps blocks for D, and what is remembered of transfers that are over."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Lease:
    """Runs out unless it is renewed; a late renewal never shortens it."""

    def __init__(self, duration: float, now: float) -> None:
        self._duration = duration
        self._ends = now + duration

    def renew(self, now: float) -> None:
        """Let it run for its whole duration from now."""
        self._ends = max(self._ends, now + self._duration)

    def expired(self, now: float) -> bool:
        """True once it has run out."""
        return now >= self._ends


class Tombstones(Generic[Value]):
    """The transfers that ended last, so that no late message brings one back; the oldest are forgotten."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ended: OrderedDict[bytes, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def add(self, transfer_id: bytes, value: Value) -> None:
        """Remember that it ended, and how."""
        self._ended[transfer_id] = value
        self._ended.move_to_end(transfer_id)
        if len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def get(self, transfer_id: bytes) -> Value | None:
        """Return how it ended; None: it did not, or that is forgotten."""
        return self._ended.get(transfer_id)
