"""Passive outlier ejection: an engine that fails in a row gets no traffic for a while."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    num_ejections: int = 0
    ejected_until: float | None = None


@dataclass(frozen=True, slots=True)
class OutlierRules:
    """When to eject and for how long (seconds)."""

    failures: int = 5
    first_ejection: float = 5.0
    longest_ejection: float = 60.0
    most_ejected: float = 0.5
    """Share of a model's engines: a fault that all of them show is not an outlier."""


class OutlierDetector:
    """Counts failures per engine. Times come from the caller, on a monotonic clock."""

    def __init__(self, rules: OutlierRules | None = None) -> None:
        self._rules = rules or OutlierRules()
        self._records: dict[str, _Record] = {}

    def succeeded(self, engine_id: str) -> None:
        """Note an answer below 500: the engine's slate is clean, ejections included."""
        record = self._records.get(engine_id)
        if record is not None and record.ejected_until is None:
            del self._records[engine_id]

    def failed(self, engine_id: str, now: float, pool: Collection[str]) -> bool:
        """Note a failure; returns whether the engine is ejected by it.

        Args:
            engine_id: who failed.
            now: the time.
            pool: ids of the engines of its model, of which only a share may be ejected at once.
        """
        record = self._records.setdefault(engine_id, _Record())
        record.num_failures += 1
        if record.ejected_until is not None or record.num_failures < self._rules.failures:
            return False
        if self.num_ejected(pool) + 1 > int(len(pool) * self._rules.most_ejected):
            return False
        length = min(self._rules.first_ejection * 2**record.num_ejections, self._rules.longest_ejection)
        record.ejected_until = now + length
        record.num_ejections += 1
        record.num_failures = 0
        return True

    def probed(self, engine_id: str, now: float) -> bool:
        """Note a good probe; returns whether it ends an ejection.

        One more failure ejects again, for longer: it answers probes, which proves little.
        """
        record = self._records.get(engine_id)
        if record is None or record.ejected_until is None or now < record.ejected_until:
            return False
        record.ejected_until = None
        record.num_failures = self._rules.failures - 1
        return True

    def num_ejected(self, pool: Collection[str]) -> int:
        """Return how many engines of a pool are ejected now."""
        records = (self._records.get(engine_id) for engine_id in pool)
        return sum(record is not None and record.ejected_until is not None for record in records)

    def forget(self, engine_id: str) -> None:
        """Drop an engine that left the list."""
        self._records.pop(engine_id, None)
