"""Streams of the make-believe device: which work waits for which, and work that another stream may still be busy with.

Work is done as it is launched, so a wait that is missing spoils no number here. It is noticed by clocks instead: each
stream counts its launches, and knows how many of every other's come before its next. Whoever reads what another
stream writes, or writes what another reads, has to know of that launch. (Lamport, 10.1145/359545.359563, as vectors.)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

Clock = dict[int, int]
"""By the number of a stream: how many of its launches come before."""
Span = tuple[int, int]
Place = tuple[int, Span]
"""A tensor's memory, and the part of it."""


class Race(AssertionError):
    """Two streams at one memory, and nothing orders them."""


class Streams:
    """All of a device; each thread launches on one of them."""

    def __init__(self) -> None:
        self.known: list[Clock] = []
        self.ended: Clock = {}
        """What the host has waited for: whatever it launches comes after."""
        self._thread = threading.local()
        self._lock = threading.RLock()  # several threads may launch on one stream
        self._default = self.make()
        self._writes: dict[int, dict[Span, Clock]] = {}
        """By memory, and by the part of it: number of the last launch of each stream that wrote there."""
        self._reads: dict[int, dict[Span, Clock]] = {}
        """The same of those that have read since."""

    def make(self) -> int:
        """A new stream's number."""
        self.known.append({})
        return len(self.known) - 1

    @property
    def current(self) -> int:
        """Of the calling thread."""
        return getattr(self._thread, "current", self._default)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Within it the calling thread launches there."""
        before, self._thread.current = self.current, stream
        try:
            yield
        finally:
            self._thread.current = before

    def now(self, stream: int) -> Clock:
        """All that comes before what is launched next on a stream."""
        return self._joined(self.known[stream], self.ended)

    def wait(self, stream: int, clock: Clock) -> None:
        """What is launched on the stream comes after that."""
        with self._lock:
            self.known[stream] = self._joined(self.known[stream], clock)

    def end(self, clock: Clock | None = None) -> None:
        """The host has waited for that; by default for everything."""
        with self._lock:
            for one in self.known if clock is None else [clock]:
                self.ended = self._joined(self.ended, one)

    def launch(self, reads: Sequence[Tensor], writes: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
        """Work on the calling thread's stream; `fresh`: memory that nobody had before."""
        with self._lock:
            self._launch(reads, writes, fresh)

    def _launch(self, reads: Sequence[Tensor], writes: Sequence[Tensor], fresh: Sequence[Tensor]) -> None:
        stream = self.current
        clock = self.now(stream)
        number = clock.get(stream, 0) + 1
        read, written, new = (list(map(_place, each)) for each in (reads, writes, fresh))
        for memory, _ in new:
            self._writes.pop(memory, None)
            self._reads.pop(memory, None)
        for tensor, place in zip((*reads, *writes), (*read, *written), strict=True):
            if (by := _unordered(_over(self._writes, place), stream, clock)) is not None:
                raise Race(f"stream {stream} comes to {list(tensor.shape)} that stream {by} may still write")
        for tensor, place in zip(writes, written, strict=True):
            if (by := _unordered(_over(self._reads, place), stream, clock)) is not None:
                raise Race(f"stream {stream} writes to {list(tensor.shape)} that stream {by} may still read")
        for place in (*written, *new):
            for noted in (self._writes, self._reads):
                _forget(noted, place)
            memory, span = place
            self._writes.setdefault(memory, {})[span] = {stream: number}
        for memory, span in read:
            self._reads.setdefault(memory, {}).setdefault(span, {})[stream] = number
        self.known[stream] = {**self.known[stream], stream: number}

    @staticmethod
    def _joined(one: Clock, other: Clock) -> Clock:
        return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in {*one, *other}}


def _over(noted: dict[int, dict[Span, Clock]], place: Place) -> list[tuple[int, int]]:
    """Streams and numbers of what was noted of a tensor's memory."""
    memory, (start, stop) = place
    spans = noted.get(memory)
    if spans is None:
        return []
    return [one for (first, last), clock in spans.items() if first < stop and start < last for one in clock.items()]


def _unordered(found: Sequence[tuple[int, int]], stream: int, clock: Clock) -> int | None:
    """A stream of these whose launch the clock does not know."""
    return next((by for by, last in found if clock.get(by, 0) < last and by != stream), None)


def _forget(noted: dict[int, dict[Span, Clock]], place: Place) -> None:
    """What comes later is ordered by the work that is all over it."""
    memory, (start, stop) = place
    spans = noted.get(memory)
    if spans is None:
        return
    for first, last in [span for span in spans if start <= span[0] and span[1] <= stop]:
        del spans[first, last]


def _place(tensor: Tensor) -> Place:
    """Its memory: first byte, and the one after the last."""
    size = tensor.itemsize
    first = int(tensor.storage_offset()) * size
    if tensor.is_contiguous():
        reach = int(tensor.numel())
    elif not tensor.numel():
        reach = 0
    else:
        reach = int(sum((count - 1) * step for count, step in zip(tensor.shape, tensor.stride(), strict=True))) + 1
    return int(tensor.untyped_storage()._cdata), (first, first + reach * size)


class FakeStream:
    """One of `streams`, which a subclass names."""

    streams: Streams
    host_waits: Any
    cuda_stream = 7

    def __init__(self, device: Any = None, number: int | None = None, **_: Any) -> None:
        self.number = self.streams.make() if number is None else number

    def wait_stream(self, other: FakeStream) -> None:
        """What comes next here comes after all that is launched there."""
        self.streams.wait(self.number, self.streams.now(other.number))

    def wait_event(self, event: FakeEvent) -> None:
        """What comes next here comes after what the event marks."""
        self.streams.wait(self.number, event.clock)

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        """The event given, or a new one."""
        import torch

        found: Any = event or torch.cuda.Event()  # type: ignore[no-untyped-call]
        found.record(self)
        return found  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        """The host waits."""
        self.streams.end(self.streams.now(self.number))
        self.host_waits("Stream.synchronize")


class FakeEvent:
    """Has happened when it is recorded, for who asks; other streams come after it only where they wait for it."""

    streams: Streams
    host_waits: Any

    def __init__(self, **_: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: FakeStream | None = None) -> None:
        """Mark what is launched on a stream, by default the calling thread's."""
        self.clock = self.streams.now(self.streams.current if stream is None else stream.number)

    def wait(self, stream: FakeStream | None = None) -> None:
        """See FakeStream.wait_event; by default the calling thread's."""
        self.streams.wait(self.streams.current if stream is None else stream.number, self.clock)

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds."""
        return 0.001

    def synchronize(self) -> None:
        """The host waits."""
        self.streams.end(self.clock)
        self.host_waits("Event.synchronize")
