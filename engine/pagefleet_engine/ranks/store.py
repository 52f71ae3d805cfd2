"""torch's way to let process groups meet, over a socket to the process that started the rank."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

# torch.distributed has it too, but its types do not say so.
from torch._C._distributed_c10d import Store

from pagefleet_engine.ranks.rendezvous import MAX_BYTES, Add, Answer, Drop, Get, Put, Request, decode_answer
from pagefleet_engine.ranks.rendezvous import encode_request as encode

_LOOK_S = 0.002
_LOOK_MOST_S = 0.1
"""Between two looks for a value that is not there yet."""


class RankStore(Store):
    """Asks the process at the other end of a socket; used by any threads. What is waited for is asked for repeatedly.

    Args:
        asking: this rank's end.
        patience: how long values are waited for.
    """

    def __init__(self, asking: socket.socket, patience: timedelta) -> None:
        super().__init__()
        self._asking = asking
        self._patience = patience
        self._lock = threading.Lock()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        self._ask(Put(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Wait for a value.

        Raises:
            RuntimeError: it did not come in time.
        """
        (value,) = self._awaited([key], self._patience)
        return value

    def add(self, key: str, value: int) -> int:
        """Add to a count; return the sum."""
        total = self._ask(Add(key, value))
        assert isinstance(total, int)
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a value where it is the expected one; return what is there then."""
        answer = self._ask(Put(key, _bytes(desired), _bytes(expected)))
        assert isinstance(answer, Sequence)
        return bytes(answer[0])

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return self._ask(Get(keys)) is not None

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all are there.

        Raises:
            RuntimeError: they did not come in time.
        """
        self._awaited(keys, timeout or self._patience)

    def delete_key(self, key: str) -> bool:
        """Forget a value; tell whether there was one."""
        return bool(self._ask(Drop(key)))

    def clone(self) -> Store:
        """Threads share this one."""
        return self

    def has_extended_api(self) -> bool:
        """Only what is needed is here."""
        return False

    def _awaited(self, keys: list[str], patience: timedelta) -> Sequence[bytes]:
        until, look_s = time.monotonic() + patience.total_seconds(), _LOOK_S
        while (values := self._ask(Get(keys))) is None:
            if time.monotonic() > until:
                raise RuntimeError(f"waited {patience.total_seconds():.0f} s for {', '.join(keys)[:200]}")
            time.sleep(look_s)
            look_s = min(2 * look_s, _LOOK_MOST_S)
        assert isinstance(values, Sequence)
        return values

    def _ask(self, request: Request) -> Answer:
        with self._lock:
            self._asking.send(encode(request))
            answer: Answer = decode_answer(self._asking.recv(MAX_BYTES))
        return answer


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
