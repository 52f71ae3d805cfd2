"""The publisher on real sockets: what a router hears and asks, and what strangers can do to it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from pagefleet_kv.config import KvEventsConfig
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.events.history import History
from pagefleet_kv.events.publisher import KvEventPublisher
from pagefleet_kv.events.sockets import MOST_PEERS, Answers
from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kv_events import Done, Dump, Replay, encode, routing_key

from tests.fakes.free_ports import free_ports
from tests.fakes.kv_events_router import WAIT_S, RouterSide

KEY = FleetKey(b"k" * 32)
INCARNATION = "0" * 31 + "1"


def contents(*numbers: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(str(number).encode()).digest()) for number in numbers]


def keys(*numbers: int) -> set[int]:
    return {routing_key(content) for content in contents(*numbers)}


@contextlib.contextmanager
def publishing(key_file: Path | None = None) -> Iterator[tuple[KvEventPublisher, int]]:
    """A publisher on ports that were free a moment ago."""
    publisher = None
    for _ in range(20):
        port = free_ports(2)
        with contextlib.suppress(KVConfigError):
            publisher = KvEventPublisher(
                KvEventsConfig("127.0.0.1", port, None if key_file is None else str(key_file)), INCARNATION, 0.05
            )
            break
    assert publisher is not None
    with publisher:
        yield publisher, port


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "fleet-key"
    file.write_bytes(KEY.secret + b"\n")
    return file


def store(publisher: KvEventPublisher, *numbers: int) -> None:
    publisher.cache_events.stored(contents(*numbers))
    publisher.flush()


def eventually(holds: Callable[[], bool]) -> None:
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < WAIT_S
        time.sleep(0.005)


def assert_works(publisher: KvEventPublisher, router: RouterSide, number: int) -> None:
    """The canary: something new is heard, and a dump says the same."""
    store(publisher, number)
    router.read_until(lambda: keys(number) <= router.keys)
    (*_, end) = router.ask(Dump())
    assert isinstance(end, Done)


def test_a_router_hears_what_is_stored_removed_and_cleared() -> None:
    with publishing() as (publisher, port), RouterSide(port) as router:
        router.sync()
        store(publisher, 1, 2, 3)
        router.read_until(lambda: router.keys == keys(1, 2, 3))
        publisher.cache_events.removed(contents(2))
        publisher.flush()
        router.read_until(lambda: router.keys == keys(1, 3))
        publisher.cache_events.cleared()
        store(publisher, 9)
        router.read_until(lambda: router.keys == keys(9))
        assert {batch.incarnation for batch in router.batches} == {INCARNATION}
        numbers = [batch.seq for batch in router.batches]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        eventually(lambda: publisher.num_published >= numbers[-1])
        assert publisher.num_dropped == 0


def test_without_news_empty_batches_tell_that_it_lives() -> None:
    with publishing() as (_, port), RouterSide(port) as router:
        router.sync()
        seen = len(router.batches)
        router.read_until(lambda: len(router.batches) >= seen + 2)
        assert all(batch.events == [] for batch in router.batches)


def test_who_comes_late_gets_all_by_a_replay_or_a_dump() -> None:
    with publishing() as (publisher, port):
        store(publisher, 1, 2)
        eventually(lambda: publisher.num_published >= 2)
        with RouterSide(port) as router:
            router.sync()
            assert router.keys == keys(1, 2)
            *batches, end = router.ask(Replay(1, 2**40))
            assert isinstance(end, Done)
            assert [batch.seq for batch in batches] == list(range(1, end.seq + 1))


def test_a_dump_larger_than_what_is_sent_at_once_arrives_whole() -> None:
    history = History(INCARNATION, keys_per_message=8)
    history.tell(False, (), contents(*range(4000)))
    with publishing() as (publisher, port), RouterSide(port) as router:
        router.sync()
        publisher._history = publisher._answers._history = history  # 500 parts, of which 64 are under way
        router.seq = None
        router.sync()
        assert router.keys == keys(*range(4000))


def test_one_question_at_a_time_and_dumps_only_so_often() -> None:
    with publishing() as (publisher, port), RouterSide(port) as router:
        router.sync()
        num_sent = sum(router.send(encode(Dump())) for _ in range(1000))
        assert num_sent > 500
        num_answers = 0
        while publisher.num_dropped + num_answers < num_sent:
            num_answers += bool(router.answers(timeout_s=0.05))
        assert num_answers < 100
        assert_works(publisher, router, 5)


class FullSocket:
    """A ROUTER socket whose peers read nothing, or are gone."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        raise self.error


def test_waiting_peers_are_bounded_and_given_up() -> None:
    socket = FullSocket(zmq.Again())
    history = History("i")
    history.tell(False, (), contents(1))
    answers = Answers(history, socket)  # type: ignore[arg-type]
    asked = [answers.ask([bytes([peer]), encode(Replay(1, 1))], now=0.0) for peer in range(MOST_PEERS + 1)]
    assert asked == [True] * MOST_PEERS + [False]
    answers.send(now=1.0)
    assert not answers.ask([b"new", encode(Dump())], now=1.0)
    assert answers.wait_s(1.0) < 1
    answers.send(now=100.0)
    assert answers.ask([b"new", encode(Dump())], now=100.0)
    socket.error = zmq.ZMQError(zmq.EHOSTUNREACH)
    answers.send(now=101.0)
    assert answers.wait_s(101.0) == float("inf")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"x" * 4096,
        encode(Replay(0, 5)),
        encode(Replay(5, 4)),
        encode(Done("i", 1)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_question_is_dropped_and_counted(data: bytes) -> None:
    with publishing() as (publisher, port), RouterSide(port) as router:
        router.sync()
        router.send(data)
        router.send(b"two", encode(Dump()))
        eventually(lambda: publisher.num_dropped >= 2)
        assert_works(publisher, router, 5)
        assert publisher.num_dropped == 2, "what came after them was a question"


def attacks() -> list[bytes]:
    seeded = random.Random(5)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    return [
        b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n" * 20,
        bytes.fromhex("16030100c8010000c40303") + seeded.randbytes(200),
        greeting,
        greeting + seeded.randbytes(300),
        greeting + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB" + b"\x00\x05\x01junk" * 50,
        greeting + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB\x02" + (2**62).to_bytes(8, "big"),
        b"\xff",
        bytes(3000),
        *(seeded.randbytes(seeded.randrange(1, 2000)) for _ in range(40)),
    ]


@pytest.mark.parametrize("with_key", [False, True], ids=["plain", "curve"])
def test_strangers_on_the_ports_change_nothing(with_key: bool, key_file: Path) -> None:
    key = KEY if with_key else None
    with contextlib.ExitStack() as stack:
        publisher, port = stack.enter_context(publishing(key_file if with_key else None))
        router = stack.enter_context(RouterSide(port, key))
        router.sync()
        for data in attacks():
            for target in (port, port + 1):
                stranger = stack.enter_context(socket.create_connection(("127.0.0.1", target)))
                with contextlib.suppress(OSError):  # it may be closed at any byte
                    stranger.sendall(data)
        for target in [port, port + 1] * 20:  # and some who say nothing
            stack.enter_context(socket.create_connection(("127.0.0.1", target)))
        assert_works(publisher, router, 5)
        eventually(lambda: publisher.num_dropped > 0)
        store(publisher, 6)
        router.read_until(lambda: len(router.keys) >= 2)
        assert router.keys == keys(5, 6)


def test_with_a_fleet_key_only_its_routers_are_heard(key_file: Path) -> None:
    other = FleetKey(os.urandom(32))
    with (
        publishing(key_file) as (publisher, port),
        RouterSide(port, KEY) as router,
        RouterSide(port, KEY, role_key=other) as knows_the_server,
        RouterSide(port, other) as forger,
        RouterSide(port) as plain,
    ):
        router.sync()
        strangers = (knows_the_server, forger, plain)
        for stranger in strangers:
            stranger.send(encode(Dump()))
        eventually(lambda: publisher.num_dropped >= 2)
        for number in range(3):
            assert_works(publisher, router, number)
        assert [stranger.read(0.0) for stranger in strangers] == [None] * 3
        assert [stranger.answers(0.0) for stranger in strangers] == [[]] * 3


def test_ports_in_use_are_a_mistake_of_the_settings() -> None:
    with publishing() as (_, port):
        with pytest.raises(KVConfigError, match=rf"port {port} \(.*in use.*\): give another kv_events_port"):
            KvEventPublisher(KvEventsConfig("127.0.0.1", port, None), "i")
        with pytest.raises(KVConfigError, match=rf"port ({port - 1}|{port}) \("):  # the second, or both
            KvEventPublisher(KvEventsConfig("127.0.0.1", port - 1, None), "i")
        with pytest.raises(KVConfigError, match=r"on no\.such\.host\.invalid port 5557 \(unknown host\)"):
            KvEventPublisher(KvEventsConfig("no.such.host.invalid", 5557, None), "i")


@pytest.mark.parametrize("content", [None, b"short"])
def test_a_fleet_key_that_is_none(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KVConfigError, match=f"fleet_key_file {file} "):
        KvEventPublisher(KvEventsConfig("127.0.0.1", free_ports(2), str(file)), "i")


def test_after_its_end_the_ports_are_closed_and_the_engine_goes_on() -> None:
    with publishing() as (publisher, _):
        store(publisher, 1)
    assert publisher._sockets.publish.closed
    assert publisher._sockets.answers.closed
    for number in range(5000):
        publisher.cache_events.stored(contents(10 + number))


def test_a_thread_that_fails_leaves_the_loop_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with publishing() as (publisher, _):
        monkeypatch.setattr(publisher._history, "tell", None)
        eventually(lambda: not publisher._thread.is_alive())
        assert "KV events are not published any more" in caplog.text
        for number in range(3000):
            store(publisher, number)
