"""The sockets between API processes and an engine core: a ZMQ pair for each over `ipc://`, msgpack in both directions.

Sockets live in a private folder (mode 0700), and a pair accepts one peer only; where that ends, the one that takes its
place binds the same address anew. Queues have no limit of their own: what is under way is bounded by the admission
limits and by each request's `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from pagefleet_engine.engine_core.messages import FromCore, ToCore
from pagefleet_engine.errors import InvalidRequest

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_TURN_BYTES = 1024 * 1024
"""Taken at once: to decode and check so much takes a few tens of milliseconds, for which running requests wait."""


def socket_address(folder: Path, asker: int = 0) -> str:
    """Return where a core in `folder` and an API process meet."""
    return f"ipc://{folder / f'{asker}.sock'}"


class CoreSocket:
    """The core's ends: blocking, used by one thread.

    Args:
        addresses: of the API processes, in the order of their numbers.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes]] = []
        for address in addresses:
            socket = self._context.socket(zmq.PAIR)
            _set_options(socket)
            socket.connect(address)
            self._poller.register(socket, zmq.POLLIN)
            self._sockets.append(socket)

    def watch(self, bell: int) -> None:
        """From now on, wait no longer than until this file descriptor is readable."""
        self._poller.register(bell, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[tuple[int, bytes]]:
        """Wait up to `timeout_s` for a message or the bell.

        Returns:
            What has come, up to a limit of its size, each message with the number of its sender.
        """
        if timeout_s > 0 and not self._poller.poll(int(timeout_s * 1000)):
            return []
        messages: list[tuple[int, bytes]] = []
        most = MAX_TURN_BYTES // len(self._sockets)
        for asker, socket in enumerate(self._sockets):
            size = 0
            while size < most:
                try:
                    data = socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                size += len(data)
                messages.append((asker, data))
        return messages

    def send(self, message: FromCore, asker: int = 0) -> None:
        """Send one message; it is queued where the other side is slow."""
        self._sockets[asker].send(msgspec.msgpack.encode(message), copy=False)

    def close(self) -> None:
        """Deliver what is queued, for at most a second, and close."""
        for socket in self._sockets:
            socket.close(linger=1000)
        self._context.term()


class ClientSocket:
    """An API process's end, for an event loop."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _set_options(self._socket)
        self._socket.bind(address)

    async def receive(self) -> bytes:
        """Return the next message."""
        data: bytes = await self._socket.recv()
        return data

    def send(self, message: ToCore) -> None:
        """Queue one message."""
        self.send_bytes(msgspec.msgpack.encode(message))

    def send_bytes(self, data: bytes) -> None:
        """Queue raw bytes."""
        self._socket.send(data)

    def close(self) -> None:
        """Drop what is queued and close."""
        self._socket.close(linger=0)
        self._context.term()


class BadMessage(Exception):
    """Bytes that are no message.

    Attributes:
        request_id: of the request that the bytes seem to be about, if any.
        reason: what is wrong, for the sender.
        param: the field, where it is one of a request.
        code: a short reason, as `InvalidRequest` has it.
    """

    def __init__(
        self, reason: str, request_id: str | None = None, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.request_id = request_id
        self.param = param
        self.code = code


def decode_to_core(data: bytes) -> ToCore:
    """Decode a message for the core.

    Raises:
        BadMessage: it is none, or a request whose parameters are out of range.
    """
    try:
        return _to_core.decode(data)
    except InvalidRequest as error:
        raise BadMessage(error.message[:200], _request_id_in(data), error.param, error.code) from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)[:200], _request_id_in(data)) from None


def decode_from_core(data: bytes) -> FromCore:
    """Decode a message of the core.

    Raises:
        BadMessage: it is none.
    """
    try:
        return _from_core.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadMessage(str(error)[:200]) from None


_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)
_from_core: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)


def _request_id_in(data: bytes) -> str | None:
    """Return the id in what looks like an AddRequest, so that its sender gets an answer."""
    try:
        fields = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(fields, list) and len(fields) > 1 and fields[0] == "add" and isinstance(fields[1], str):
        return fields[1]
    return None


def _set_options(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
