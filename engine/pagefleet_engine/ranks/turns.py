"""Two halves of a step take turns at computing: one computes while what the other sends is on its way between ranks.

Each has a thread. Only the one whose turn it is computes; it gives its turn away where it sends something, and goes on
once that has come and it is its turn again. Both come to the same places in the same order, so what the first half
does between two of them is done before the second half comes there: that one finds the keys that it attends to.
On a GPU both launch on one stream, and what is sent goes by another: a half gives its turn away once it has launched
that, and its stream waits for what comes in the place of the host.

```
first    attention ──> travels ........ experts ──> travels ........ attention
second                 attention ──> travels ...... experts ──> travels ....
```
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TypeVar

import torch

from pagefleet_engine.ranks.group import RankGroup
from pagefleet_engine.ranks.stages import NOBODY_LOOKS, Awaiting

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Halves:
    """What a rank has to compute steps in halves."""

    turns: Turns
    data: RankGroup
    """Through which rows of the second half travel; those of the first take `Communicators.data`."""


class SideStream:
    """Of a GPU: on it travels what halves send, beside the stream on which they compute."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @contextmanager
    def sending(self) -> Iterator[torch.cuda.Event]:
        """What is launched within begins when all has ended that was launched before; the event is its end.

        So memory of either stream may be given to the other half once nobody on the host holds it: whoever sends next
        comes after all that was computed with it, and whoever computes on has waited for the event.
        """
        came = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield came
            came.record(self._stream)


class Turns:
    """Of one rank; `take` is called by one thread.

    Args:
        awaiting: what a half waits for its turn in.
        side: on which it sends; None: the host itself does, on a CPU.
    """

    def __init__(self, awaiting: Awaiting = NOBODY_LOOKS, side: SideStream | None = None) -> None:
        self._awaiting, self._side = awaiting, side
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
            arguments = self._work, self._awaiting
            self._thread = threading.Thread(target=_serve, args=arguments, name="second half", daemon=True)
            self._thread.start()
        step, later = _Step(self._awaiting), Future[_T]()
        beside = nullcontext() if self._side is None else torch.cuda.stream(torch.cuda.current_stream())
        self._work.put(lambda: self._compute(1, step, second, later, beside))
        now = Future[_T]()
        self._compute(0, step, first, now)
        with self._awaiting:
            return now.result(), later.result()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Let the other half compute meanwhile, if there is one."""
        step, half = self._own.step, self._own.half
        if step is None:
            yield
        elif self._side is None:
            step.give(1 - half)
            yield
            step.wait(half)
        else:
            with self._side.sending() as came:
                yield
            step.give(1 - half)
            step.wait(half)
            came.wait()

    def _compute(
        self,
        half: int,
        step: _Step,
        work: Callable[[], _T],
        result: Future[_T],
        within: AbstractContextManager[object] = NOBODY_LOOKS,
    ) -> None:
        """Compute a half in its own thread; `within`: what makes the thread's stream that of the other."""
        own = self._own
        own.step, own.half = step, half
        try:
            with within:
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

    awaiting: Awaiting
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
        with self.awaiting:
            self.turns[half].acquire()
        if self.error is not None:
            raise self.error


class _Own(threading.local):
    """What the calling thread computes."""

    step: _Step | None = None
    half: int = 0


def _serve(work: SimpleQueue[Callable[[], None]], awaiting: Awaiting) -> None:
    while True:
        with awaiting:
            compute = work.get()
        compute()
