"""The control sockets: who is heard, who is not, and what a flood of anything does to them (nothing)."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from pagefleet_kv.curve import dial_with
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.p2p.control_plane import READ_MOST, ControlPlane, Received
from pagefleet_protocol.fleet_key import FleetKey, FleetRole
from pagefleet_protocol.kv_control import MAX_MESSAGE_BYTES

from tests.fakes.byte_pages import PATIENCE_S

KEY = FleetKey(b"k" * 32)


class End:
    """One engine's control sockets, and what came on them."""

    def __init__(self, key: FleetKey = KEY) -> None:
        self.plane = ControlPlane("127.0.0.1", 0, key)
        self.received: list[Received] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.plane.port}"

    def look(self) -> None:
        poller = zmq.Poller()
        for inbound in self.plane.inbound:
            poller.register(inbound, zmq.POLLIN)
        poller.poll(10)
        self.received += self.plane.receive()


def until(holds: Callable[[], bool], *ends: End) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        for end in ends:
            end.look()


@contextlib.contextmanager
def two() -> Iterator[tuple[End, End]]:
    asked, asking = End(), End()
    try:
        yield asked, asking
    finally:
        asked.plane.close()
        asking.plane.close()


def works(asked: End, asking: End, text: bytes = b"canary") -> bool:
    """Whether a question is heard, and then its answer."""
    asking.plane.dial("p", asked.address)
    asking.plane.send("p", text)
    until(lambda: any(one.data == text for one in asked.received), asked, asking)
    question = next(one for one in asked.received if one.data == text)
    asked.plane.send(question.peer, text + b"!")
    until(lambda: any(one.data == text + b"!" for one in asking.received), asked, asking)
    return not question.is_answer and Received("p", True, text + b"!") in asking.received


@contextlib.contextmanager
def client(address: str, key: FleetKey | None, role: FleetRole = "engine-peer") -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        if key is not None:
            dial_with(dealer, key, role)
        dealer.connect(f"tcp://{address}")
        yield dealer


def test_engines_of_one_fleet_hear_each_other() -> None:
    with two() as (asked, asking):
        assert works(asked, asking)
        asking.plane.dial("p", asked.address)  # once more changes nothing
        assert works(asked, asking, b"again")
        asking.plane.hang_up("p")
        asking.plane.hang_up("p")
        asking.plane.send("p", b"to nobody")
        assert works(asked, asking, b"dialled anew")
        assert b"to nobody" not in [one.data for one in asked.received]
        assert asked.plane.num_refused == asking.plane.num_refused == 0


@pytest.mark.parametrize(
    ("key", "role"),
    [(None, "router"), (FleetKey(b"o" * 32), "engine-peer"), (KEY, "router"), (KEY, "engine")],
    ids=["no key", "another key", "a router", "an engine's own key"],
)
def test_others_are_not_heard(key: FleetKey | None, role: FleetRole) -> None:
    with two() as (asked, asking), client(asked.address, key, role) as stranger:
        stranger.send(b"hear me")
        until(lambda: asked.plane.num_refused > 0, asked)
        assert works(asked, asking)
        assert b"hear me" not in [one.data for one in asked.received]


def test_who_listens_with_another_key_is_not_told_anything() -> None:
    other, asking = End(FleetKey(b"o" * 32)), End()
    asking.plane.dial("p", other.address)
    asking.plane.send("p", b"a secret")
    until(lambda: other.plane.num_refused > 0, other, asking)
    assert other.received == []
    other.plane.close()
    asking.plane.close()


def test_messages_of_another_form_are_dropped_and_counted() -> None:
    with two() as (asked, asking), client(asked.address, KEY) as member:
        member.send_multipart([b"two", b"parts"])
        member.send(b"")
        until(lambda: asked.plane.num_refused == 1 and any(one.data == b"" for one in asked.received), asked)
        member.send(bytes(MAX_MESSAGE_BYTES + 1))  # ends its connection
        assert works(asked, asking)
        assert max(len(one.data) for one in asked.received) < MAX_MESSAGE_BYTES


def test_one_turn_takes_so_much_of_a_flood() -> None:
    with two() as (asked, asking), client(asked.address, KEY) as member:
        for number in range(4 * READ_MOST):
            with contextlib.suppress(zmq.Again):
                member.send(b"%d" % number, zmq.NOBLOCK)
        most = 0
        deadline = time.monotonic() + PATIENCE_S
        while len(asked.received) < 2 * READ_MOST:
            assert time.monotonic() < deadline
            before = len(asked.received)
            asked.look()
            most = max(most, len(asked.received) - before)
        assert most <= READ_MOST
        assert works(asked, asking)


def test_noise_on_the_port_harms_nobody() -> None:
    drawn = random.Random(12)
    greeting = b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x01CURVE".ljust(64, b"\x00")
    with two() as (asked, asking):
        assert works(asked, asking)
        for number in range(60):
            with socket.create_connection(("127.0.0.1", asked.plane.port)) as raw:
                raw.sendall((greeting if number % 2 else b"") + drawn.randbytes(drawn.randrange(1, 4096)))
                select.select([raw], [], [], 0)
            asked.look()
        assert works(asked, asking, b"still here")


def test_answers_go_to_who_asked_alone() -> None:
    with two() as (asked, asking), client(asked.address, KEY) as member:
        member.send(b"mine")
        until(lambda: len(asked.received) == 1, asked)
        assert works(asked, asking)
        asked.plane.send(asked.received[0].peer, b"for the member")
        asked.plane.send("asking:00", b"for nobody")
        asked.plane.send("127.0.0.1:1", b"for nobody")
        assert member.poll(int(PATIENCE_S * 1000))
        assert member.recv() == b"for the member"


def test_a_port_that_is_taken_is_a_mistake_of_configuration() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(KVConfigError, match="give another kv_port"):
        ControlPlane("127.0.0.1", taken.getsockname()[1], KEY)
    with pytest.raises(KVConfigError, match="unknown host"):
        ControlPlane("no.such.host.invalid", 1, KEY)
