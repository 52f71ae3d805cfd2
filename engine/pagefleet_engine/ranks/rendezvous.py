"""Where ranks meet: names with values that one process keeps for all of them. Knows no torch.

torch's own store listens on a port that anybody may use. This one is asked over what ranks have anyway: a socket to
the process that started them, and from there the link to the leader.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

MAX_BYTES = 1 << 20
"""Of a request or an answer."""
COPIES = "copies/"
"""What names begin with that ranks of several copies of the model ask for."""


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
_kept: msgspec.msgpack.Decoder[dict[str, bytes]] = msgspec.msgpack.Decoder(dict[str, bytes])


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
        return _answer(self._values, request)


class JointTable(RendezvousTable):
    """A table of one copy of the model, of which names below `COPIES` are those of all copies that step together: they
    are in memory that all copies' processes have, so that ranks of different copies meet.

    Args:
        fd: descriptor of that memory.
    """

    def __init__(self, fd: int) -> None:
        super().__init__()
        # A lock belongs to an opened file, and one that is inherited is the same in all processes.
        self._joint = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    def _answer(self, request: Request) -> Answer:
        names = request.names if isinstance(request, Get) else [request.name]
        if not all(name.startswith(COPIES) for name in names):
            return super()._answer(request)
        fcntl.flock(self._joint, fcntl.LOCK_EX)
        try:
            kept = os.pread(self._joint, os.fstat(self._joint).st_size, 0)
            values = _kept.decode(kept) if kept else {}
            answer = _answer(values, request)
            if not isinstance(request, Get):
                os.ftruncate(self._joint, 0)
                os.pwrite(self._joint, msgspec.msgpack.encode(values), 0)
            return answer
        finally:
            fcntl.flock(self._joint, fcntl.LOCK_UN)


def _answer(values: dict[str, bytes], request: Request) -> Answer:
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
