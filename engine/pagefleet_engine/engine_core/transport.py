"""The socket between the API process and the engine core: one ZMQ pair over `ipc://`, msgpack in both directions.

The socket lives in a private folder (mode 0700), and a pair accepts one peer only. Queues have no limit of their own:
what is under way is bounded by the admission limits and by each request's `max_tokens`.
"""

from __future__ import annotations

import msgspec
import zmq
import zmq.asyncio

from pagefleet_engine.engine_core.messages import FromCore, ToCore
from pagefleet_engine.errors import InvalidRequest

MAX_MESSAGE_BYTES = 256 * 1024 * 1024
MAX_TURN_BYTES = 1024 * 1024
"""Taken at once: to decode and check so much takes a few tens of milliseconds, for which running requests wait."""


class CoreSocket:
    """The core's end: blocking, used by one thread."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        _set_options(self._socket)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def watch(self, bell: int) -> None:
        """From now on, wait no longer than until this file descriptor is readable."""
        self._poller.register(bell, zmq.POLLIN)

    def receive(self, timeout_s: float) -> list[bytes]:
        """Wait up to `timeout_s` for a message or the bell and return what has come, up to a limit of its size."""
        if timeout_s > 0 and not self._poller.poll(int(timeout_s * 1000)):
            return []
        messages: list[bytes] = []
        size = 0
        while size < MAX_TURN_BYTES:
            try:
                messages.append(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            size += len(messages[-1])
        return messages

    def send(self, message: FromCore) -> None:
        """Send one message; it is queued where the other side is slow."""
        self._socket.send(msgspec.msgpack.encode(message), copy=False)

    def close(self) -> None:
        """Deliver what is queued, for at most a second, and close."""
        self._socket.close(linger=1000)
        self._context.term()


class ClientSocket:
    """The API process's end, for an event loop."""

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
