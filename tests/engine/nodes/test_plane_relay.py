"""What is between a leader and planes on devices of another machine's ranks."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import pytest
from pagefleet_engine.executor.asked_planes import PlaneRings
from pagefleet_engine.executor.ring import Buffer, RingReader, RingWriter, make_ring_pair
from pagefleet_engine.nodes.plane_relay import PlaneRelay
from pagefleet_engine.nodes.remote_node import LinkWire
from pagefleet_engine.ranks.doorbell import Doorbell

PATIENCE_S = 120.0


class Told:
    """What the leader is told."""

    def __init__(self) -> None:
        self.parts: deque[tuple[int, Sequence[bytes]]] = deque()
        self.has_failed = threading.Event()
        self._count = threading.Semaphore(0)

    def tell(self, rank: int, parts: Sequence[bytes]) -> None:
        self.parts.append((rank, parts))
        self._count.release()

    def take(self) -> tuple[int, Sequence[bytes]]:
        assert self._count.acquire(timeout=PATIENCE_S)
        return self.parts.popleft()


class Ranks:
    """Two, whose planes answer what they are asked."""

    def __init__(self) -> None:
        self.handles = [make_ring_pair(1 << 12) for _ in range(2)]
        self.wires = {rank: PlaneRings(pair) for rank, pair in zip((2, 3), self.handles, strict=True)}

    def answer(self, index: int, num: int) -> None:
        asked, answers = RingReader(self.handles[index].there), RingWriter(self.handles[index].back)
        for _ in range(num):
            parts = asked.receive(PATIENCE_S)
            assert parts is not None
            answers.send([b"".join(parts)], lambda: None)

    def close(self) -> None:
        for fd in (fd for pair in self.handles for fd in pair.fds):
            os.close(fd)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def test_words_pass_both_ways_also_more_than_a_ring_holds(ranks: Ranks) -> None:
    told = Told()
    relay = PlaneRelay(ranks.wires, told.tell, told.has_failed.set)
    answering = [threading.Thread(target=ranks.answer, args=(index, 50)) for index in range(2)]
    for one in answering:
        one.start()
    for number in range(50):
        for rank in (2, 3):
            relay.ask(rank, [bytes([number, rank]), bytes(700)])
    heard = [told.take() for _ in range(100)]
    for rank in (2, 3):
        of_rank = [parts for number, parts in heard if number == rank]
        assert of_rank == [[bytes([number, rank]) + bytes(700)] for number in range(50)]
    for one in answering:
        one.join()
    relay.close()
    assert not told.has_failed.is_set()


class Wire:
    """To planes that make no room until what they told was taken; or to none."""

    def __init__(self, *, is_broken: bool = False) -> None:
        self._told: list[bytes] = []
        self._is_broken = is_broken
        self._bell = Doorbell()
        self.bell = self._bell.fd

    def send(self, parts: Sequence[Buffer], or_raise: Callable[[], None]) -> None:
        if self._is_broken:
            raise ValueError("a mistake")
        self._told.append(b"first")
        while self._told:
            or_raise()

    def receive(self, timeout_s: float) -> Sequence[Buffer] | None:
        return [self._told.pop()] if self._told else None

    def close(self) -> None:
        self._bell.close()


def test_what_is_told_is_taken_while_planes_make_no_room() -> None:
    told, wire = Told(), Wire()
    relay = PlaneRelay({0: wire}, told.tell, told.has_failed.set)
    relay.ask(0, [b"asked"])
    assert told.take() == (0, [b"first"])
    relay.close()
    wire.close()


def test_a_relay_ends_while_planes_make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    told, wire = Told(), Wire()
    monkeypatch.setattr(wire, "receive", lambda timeout_s: None)
    relay = PlaneRelay({0: wire}, told.tell, told.has_failed.set)
    relay.ask(0, [b"asked"])
    relay.close()
    assert not told.has_failed.is_set()
    wire.close()


def test_a_relay_that_fails_says_so() -> None:
    told, wire = Told(), Wire(is_broken=True)
    relay = PlaneRelay({0: wire}, told.tell, told.has_failed.set)
    relay.ask(0, [b"asked"])
    assert told.has_failed.wait(PATIENCE_S)
    relay.close()
    wire.close()


def test_a_wire_over_the_link_rings_while_there_is_something() -> None:
    sent: list[Sequence[Buffer]] = []
    wire = LinkWire(sent.append)

    def rings() -> bool:
        return bool(select.select([wire.bell], [], [], 0)[0])

    assert wire.receive(0) is None
    wire.put([b"one"])
    wire.put([b"two", b"more"])
    assert rings()
    assert wire.receive(0) == [b"one"]
    assert rings()
    assert wire.receive(0) == [b"two", b"more"]
    assert not rings()
    wire.send([b"asked"], lambda: None)
    assert sent == [[b"asked"]]
