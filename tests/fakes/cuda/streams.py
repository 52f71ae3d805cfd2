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
        for memory in map(_memory, fresh):
            self._writes.pop(memory, None)
            self._reads.pop(memory, None)
        for tensor in (*reads, *writes):
            if (by := _unordered(_over(self._writes, tensor), stream, clock)) is not None:
                raise Race(f"stream {stream} comes to {list(tensor.shape)} that stream {by} may still write")
        for tensor in writes:
            if (by := _unordered(_over(self._reads, tensor), stream, clock)) is not None:
                raise Race(f"stream {stream} writes to {list(tensor.shape)} that stream {by} may still read")
        for tensor in (*writes, *fresh):
            for noted in (self._writes, self._reads):
                _forget(noted, tensor)
            self._writes.setdefault(_memory(tensor), {})[_span(tensor)] = {stream: number}
        for tensor in reads:
            self._reads.setdefault(_memory(tensor), {}).setdefault(_span(tensor), {})[stream] = number
        self.known[stream] = {**self.known[stream], stream: number}

    @staticmethod
    def _joined(one: Clock, other: Clock) -> Clock:
        return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in {*one, *other}}


def _over(noted: dict[int, dict[Span, Clock]], tensor: Tensor) -> list[tuple[int, int]]:
    """Streams and numbers of what was noted of a tensor's memory."""
    start, stop = _span(tensor)
    spans = noted.get(_memory(tensor), {})
    return [one for (first, last), clock in spans.items() if first < stop and start < last for one in clock.items()]


def _unordered(found: Sequence[tuple[int, int]], stream: int, clock: Clock) -> int | None:
    """A stream of these whose launch the clock does not know."""
    return next((by for by, last in found if clock.get(by, 0) < last and by != stream), None)


def _forget(noted: dict[int, dict[Span, Clock]], tensor: Tensor) -> None:
    """What comes later is ordered by the work that is all over it."""
    start, stop = _span(tensor)
    spans = noted.get(_memory(tensor), {})
    for first, last in [span for span in spans if start <= span[0] and span[1] <= stop]:
        del spans[first, last]


def _span(tensor: Tensor) -> Span:
    """First byte of its memory, and the one after the last."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first, count = int(tensor.storage_offset()), int(reach) if tensor.numel() else 0
    return first * tensor.itemsize, (first + count) * tensor.itemsize


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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
