"""Where the time from a process's start to its first request goes, by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal[
    "imports", "config", "tokenizer", "weights", "compile", "profile", "kv_pool", "graphs", "warm_up", "other"
]


class StartupTimes:
    """Seconds of each phase, in the order in which they began. A phase within another counts for itself only.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: dict[str, float] = {}
        self._inner: list[float] = []
        """Seconds of finished phases within each one that runs, the outermost first."""

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Count what runs inside to the phase, also when it fails; a phase may run several times."""
        self._seconds.setdefault(name, 0.0)
        self._inner.append(0.0)
        began = self._clock()
        try:
            yield
        finally:
            taken = self._clock() - began
            self._seconds[name] += taken - self._inner.pop()
            if self._inner:
                self._inner[-1] += taken

    @property
    def total(self) -> float:
        """Seconds since this object was made."""
        return self._clock() - self._began

    def seconds(self) -> dict[str, float]:
        """Each phase so far, `other` for what belongs to none, and the `total`."""
        total = self.total
        named = dict(self._seconds)
        named["other"] = named.get("other", 0.0) + total - sum(self._seconds.values())
        return {**named, "total": total}

    def describe(self) -> str:
        """One line for the log; phases under 10 ms are not worth their words."""
        seconds = self.seconds()
        total = seconds.pop("total")
        phases = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.01)
        return f"started in {total:.2f} s: {phases or 'nothing that took time'}"
