"""Which InferenceService is to be looked at next, and when: pure, so that time can be told to it.

One entry for each key however often it is asked for; no key twice at a time; first come, first served; failures wait
longer each time; nothing is looked at more often than its pace, whatever happens to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds between looks at one key."""

    least_s: float = 0.25
    """100 edits a second become four looks."""
    first_retry_s: float = 1.0
    most_retry_s: float = 60.0


class Backlog(Generic[KeyT]):
    """Keys with the time at which each is due. `now` never goes back."""

    def __init__(self, pace: Pace, jitter: Callable[[], float]) -> None:
        """`jitter` returns a number in [0, 1), a new one each time."""
        self._pace = pace
        self._jitter = jitter
        self._due: dict[KeyT, float] = {}
        self._heap: list[tuple[float, int, KeyT]] = []
        self._pushed = 0
        self._active: dict[KeyT, float] = {}
        self._again: dict[KeyT, float] = {}
        self._started: dict[KeyT, float] = {}
        self._failures: dict[KeyT, int] = {}
        self._not_before: dict[KeyT, float] = {}

    def add(self, key: KeyT, now: float, delay_s: float = 0.0) -> None:
        """Have a key looked at, not later than it was to be anyway."""
        pause = self._pace.first_retry_s if key in self._failures else self._pace.least_s
        # The pause after a failure is for all reasons to look, or a busy object would fail at full speed.
        due = max(now + delay_s, self._started.get(key, now - pause) + pause, self._not_before.get(key, 0.0))
        if key in self._active:
            self._again[key] = min(due, self._again.get(key, due))
        elif due < self._due.get(key, float("inf")):
            self._push(key, due)

    def take(self, now: float) -> KeyT | None:
        """Return the key that has been due for the longest; None: none is due."""
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) != due:
                continue  # asked for earlier since, or forgotten
            del self._due[key]
            self._active[key] = self._started[key] = now
            return key
        return None

    def settled(self, key: KeyT, now: float, look_again_s: float) -> None:
        """Look again in so many seconds, or sooner if that was asked for meanwhile."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        self._release(key, now, look_again_s)

    def failed(self, key: KeyT, now: float, at_least_s: float = 0.0) -> float:
        """Look again after a pause that grows with each failure; returns it. `at_least_s` is what the server asked."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        pause = min(self._pace.most_retry_s, self._pace.first_retry_s * 2.0 ** min(failures - 1, 32))
        pause = max(pause * (0.8 + 0.4 * self._jitter()), at_least_s)
        self._not_before[key] = now + at_least_s
        self._release(key, now, pause)
        return pause

    def forget(self, key: KeyT) -> None:
        """Drop a key that was taken and is no more, unless it was asked for meanwhile."""
        self._failures.pop(key, None)
        self._not_before.pop(key, None)
        del self._active[key]
        if (again := self._again.pop(key, None)) is not None:
            self._push(key, again)
        else:
            self._started.pop(key, None)

    def next_due(self) -> float | None:
        """Return when the next key is due; None: there is none."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def depth(self, now: float) -> int:
        """Return how many keys are due and not taken."""
        return sum(due <= now for due in self._due.values())

    def longest_wait_s(self, now: float) -> float:
        """Return how long ago the first key was due that nobody took."""
        due = self.next_due()
        return 0.0 if due is None else max(0.0, now - due)

    def longest_work_s(self, now: float) -> float:
        """Return how long the longest look under way has taken."""
        return max((now - started for started in self._active.values()), default=0.0)

    def _release(self, key: KeyT, now: float, delay_s: float) -> None:
        del self._active[key]
        due = now + delay_s
        if (again := self._again.pop(key, None)) is not None:
            due = min(due, max(again, self._not_before.get(key, 0.0)))
        self._push(key, due)

    def _push(self, key: KeyT, due: float) -> None:
        self._due[key] = due
        self._pushed += 1
        heapq.heappush(self._heap, (due, self._pushed, key))
