"""Passive outlier ejection: an engine that fails in a row gets no traffic for a while."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    num_ejections: int = 0
    ejected_until: float | None = None
    model: str = ""
    """Whose engine it was when it was ejected."""


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
        self._num_ejected: Counter[str] = Counter()
        """Now, by model."""

    def succeeded(self, engine_id: str) -> None:
        """Note an answer below 500: the engine's slate is clean, ejections included."""
        record = self._records.get(engine_id)
        if record is not None and record.ejected_until is None:
            del self._records[engine_id]

    def failed(self, engine_id: str, now: float, model: str, num_engines: int) -> bool:
        """Note a failure; returns whether the engine is ejected by it.

        Args:
            engine_id: who failed.
            now: the time.
            model: whose engine it is.
            num_engines: that this model has, of which only a share may be ejected at once.
        """
        record = self._records.setdefault(engine_id, _Record())
        record.num_failures += 1
        if record.ejected_until is not None or record.num_failures < self._rules.failures:
            return False
        if self._num_ejected[model] + 1 > int(num_engines * self._rules.most_ejected):
            return False
        length = min(self._rules.first_ejection * 2**record.num_ejections, self._rules.longest_ejection)
        record.ejected_until = now + length
        record.model = model
        self._num_ejected[model] += 1
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
        self._count_back(record.model)
        record.num_failures = self._rules.failures - 1
        return True

    def num_ejected(self, model: str) -> int:
        """Return how many engines of a model are ejected now."""
        return self._num_ejected[model]

    def forget(self, engine_id: str) -> None:
        """Drop an engine that left the list."""
        record = self._records.pop(engine_id, None)
        if record is not None and record.ejected_until is not None:
            self._count_back(record.model)

    def _count_back(self, model: str) -> None:
        self._num_ejected[model] -= 1
        if not self._num_ejected[model]:
            del self._num_ejected[model]
