"""Two halves of a step take turns at computing: one computes while what the other sends is on its way between ranks.

Each has a thread. Only the one whose turn it is computes; it gives its turn away where it sends something, and goes on
once that has come and it is its turn again. Both come to the same places in the same order, so what the first half
does between two of them is done before the second half comes there: that one finds the keys that it attends to.

```
first    attention ──> travels ........ experts ──> travels ........ attention
second                 attention ──> travels ...... experts ──> travels ....
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

from pagefleet_engine.ranks.group import RankGroup

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """What a rank has to compute steps in halves."""

    turns: Turns
    data: RankGroup
    """Through which rows of the second half travel; those of the first take `Communicators.data`."""


class Turns:
    """Of one rank; `take` is called by one thread."""

    def __init__(self) -> None:
        self._own = _Own()
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def half(self) -> int:
        """Which half the calling thread computes, 0 or 1; 0 also where there are none."""
        return self._own.half

    def take(self, first: Callable[[], _T], second: Callable[[], _T]) -> tuple[_T, _T]:
        """Compute both halves. Where one fails the other stops at its next turn, and is not waited for."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._work,), name="second half", daemon=True)
            self._thread.start()
        step, later = _Step(), Future[_T]()
        self._work.put(lambda: self._compute(1, step, second, later))
        now = Future[_T]()
        self._compute(0, step, first, now)
        return now.result(), later.result()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let the other half compute meanwhile, if there is one."""
        own = self._own
        if own.step is None:
            yield
            return
        own.step.give(1 - own.half)
        yield
        own.step.wait(own.half)

    def _compute(self, half: int, step: _Step, work: Callable[[], _T], result: Future[_T]) -> None:
        """Compute a half in its own thread."""
        own = self._own
        own.step, own.half = step, half
        try:
            if half:
                step.wait(half)
            result.set_result(work())
        except BaseException as error:
            step.error = step.error or error
            result.set_exception(step.error)
        finally:
            own.step, own.half = None, 0
            step.give(1 - half)


@dataclass(slots=True, eq=False)
class _Step:
    """One that is computed in halves."""

    turns: tuple[threading.Semaphore, threading.Semaphore] = field(
        default_factory=lambda: (threading.Semaphore(0), threading.Semaphore(0))
    )
    error: BaseException | None = None
    """That ended one of them."""

    def give(self, half: int) -> None:
        """It is the turn of that half; one that is over does not mind."""
        self.turns[half].release()

    def wait(self, half: int) -> None:
        """Wait for a turn; raises what ended the other half."""
        self.turns[half].acquire()
        if self.error is not None:
            raise self.error


class _Own(threading.local):
    """What the calling thread computes."""

    step: _Step | None = None
    half: int = 0


def _serve(work: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        work.get()()
