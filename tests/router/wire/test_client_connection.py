"""One client connection without a network: what it takes on while its client does not read."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from pagefleet_router.errors import Refusal
from pagefleet_router.wire.client_connection import ClientConnection, ConnectionRules, Responder
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.memory import SMALL_BYTES, BodyMemory

REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


class Transport:
    """Takes everything, as a socket whose peer does not read."""

    def __init__(self) -> None:
        self.written = b""
        self.reading = True
        self.aborted = False

    def get_extra_info(self, name: str) -> None:
        return None

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        return

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self.aborted = True

    def abort(self) -> None:
        self.aborted = True


class Front:
    """Answers nothing by itself."""

    def __init__(self) -> None:
        self.requests: list[ClientRequest] = []

    def on_head(self, request: ClientRequest) -> None:
        return

    def on_request(self, request: ClientRequest, client: ClientConnection) -> None:
        self.requests.append(request)
        client.begin(cast(Responder, Nobody()))

    def on_refused(self, request: ClientRequest, refusal: Refusal) -> None:
        return

    def on_finished(self, responder: Responder) -> None:
        return


class Nobody:
    def client_lost(self) -> None:
        return

    def client_paused(self) -> None:
        return

    def client_resumed(self) -> None:
        return

    def check(self, now: float) -> None:
        return


class Scene:
    """A connection, what is behind it, and the time."""

    def __init__(self, memory: BodyMemory | None = None) -> None:
        self.now = 0.0
        self.front, self.transport = Front(), Transport()
        rules = ConnectionRules(max_body_bytes=100_000, max_connections=10, memory=memory or BodyMemory(100_000))
        self.connection = ClientConnection(self.front, set(), rules, lambda: self.now)
        self.connection.connection_made(cast(asyncio.Transport, self.transport))


@pytest.mark.parametrize("pipelined", [True, False])
def test_nothing_is_begun_for_a_client_that_has_not_read_the_last_answer(pipelined: bool) -> None:
    async def scenario() -> None:
        scene = Scene()
        connection, requests = scene.connection, scene.front.requests
        connection.data_received(REQUEST * 2 if pipelined else REQUEST)
        assert len(requests) == 1
        connection.write(b"all of a large answer")
        connection.pause_writing()
        connection.finish(keep_alive=True)
        await asyncio.sleep(0)
        if not pipelined:
            connection.data_received(REQUEST)
        await asyncio.sleep(0)
        assert len(requests) == 1, "its answer could only be piled up"
        connection.resume_writing()
        await asyncio.sleep(0)
        assert len(requests) == 2
        connection.check(scene.now + 1000.0)
        assert not scene.transport.aborted, "a request that is being answered has no deadline here"

    asyncio.run(scenario())


def test_a_client_that_never_reads_is_dropped() -> None:
    async def scenario() -> None:
        scene = Scene()
        connection = scene.connection
        connection.data_received(REQUEST)
        connection.pause_writing()
        connection.finish(keep_alive=True)
        connection.data_received(REQUEST * 2000)
        assert not scene.transport.reading, "what waits is bounded"
        connection.check(59.0)
        assert not scene.transport.aborted
        connection.check(61.0)
        assert scene.transport.aborted

    asyncio.run(scenario())


def request_of(num_bytes: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % num_bytes + b" " * num_bytes


@pytest.mark.parametrize("whole", [True, False])
def test_large_bodies_of_all_clients_share_a_bound(whole: bool) -> None:
    async def scenario() -> None:
        memory = BodyMemory(100_000)
        one, two = Scene(memory), Scene(memory)
        data = request_of(70_000)
        one.connection.data_received(data if whole else data[:-1])
        assert memory.num_bytes >= 69_999
        two.connection.data_received(data)
        assert two.transport.written.startswith(b"HTTP/1.1 503 ")
        assert b"server_is_overloaded" in two.transport.written
        assert two.front.requests == []
        two.connection.connection_lost(None)
        small = Scene(memory)
        small.connection.data_received(request_of(SMALL_BYTES))
        assert len(small.front.requests) == 1, "small ones are let through"
        if whole:
            one.connection.finish(keep_alive=True)
        else:
            one.connection.connection_lost(None)
        assert memory.num_bytes == 0
        three = Scene(memory)
        three.connection.data_received(data)
        assert len(three.front.requests) == 1

    asyncio.run(scenario())


def test_what_was_pipelined_is_given_back_with_the_connection() -> None:
    async def scenario() -> None:
        memory = BodyMemory(100_000)
        scene = Scene(memory)
        scene.connection.data_received(request_of(20_000) * 3 + request_of(30_000)[:-5])
        assert memory.num_bytes == 3 * 20_000 + 29_995
        scene.connection.connection_lost(None)
        assert memory.num_bytes == 0

    asyncio.run(scenario())
