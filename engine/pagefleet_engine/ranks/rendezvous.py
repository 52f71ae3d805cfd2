"""Where ranks meet: names with values that one process keeps for all of them. Knows no torch.

torch's own store listens on a port that anybody may use. This one is asked over what ranks have anyway: a socket to
the process that started them, and from there the link to the leader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

MAX_BYTES = 1 << 20
"""Of a request or an answer."""


class Put(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Set a value; the answer is it."""

    name: str
    value: bytes
    expected: bytes | None = None
    """Only where this is the value now, or where there is none and this is empty; the answer is what is there then."""


class Get(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Ask for values; the answer is None while one is missing."""

    names: Sequence[str]


class Add(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Add to a count, which is kept as digits; the answer is the sum."""

    name: str
    amount: int


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Forget a value; the answer tells whether there was one."""

    name: str


Request = Put | Get | Add | Drop
Answer = int | bool | Sequence[bytes] | None

encode_request = msgspec.msgpack.Encoder().encode
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
decode_answer = msgspec.msgpack.Decoder(Answer).decode


class Rendezvous(Protocol):
    """Answers what ranks ask."""

    def ask(self, request: bytes, answer: Callable[[bytes], None]) -> None:
        """Call `answer` with the encoded answer, now or from this thread later."""
        ...


class RendezvousTable:
    """Implements `Rendezvous` by keeping the values; any thread may ask."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def ask(self, request: bytes, answer: Callable[[bytes], None]) -> None:
        """See Rendezvous."""
        answer(self.answer(request))

    def answer(self, request: bytes) -> bytes:
        """Return the answer.

        Raises:
            msgspec.DecodeError: that is no request.
        """
        with self._lock:
            return msgspec.msgpack.encode(self._answer(_requests.decode(request)))

    def _answer(self, request: Request) -> Answer:
        values = self._values
        match request:
            case Put(name, value, expected):
                if expected is None or values.get(name, b"") == expected:
                    values[name] = value
                return [values.get(name, expected or b"")]
            case Get(names):
                return [values[name] for name in names] if all(name in values for name in names) else None
            case Add(name, amount):
                total = int(values.get(name, b"0")) + amount
                values[name] = str(total).encode()
                return total
            case Drop(name):
                return values.pop(name, None) is not None
