"""What a source gave out to engines that may connect to it: each good once, for one peer and for a short time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

INVITATION_S = 30.0
MAX_INVITATIONS = 256


@dataclass(frozen=True, slots=True)
class Invited:
    """One who may connect."""

    peer: str
    secret: bytes
    """What proves it, where the number alone does not."""
    good_until: float


class Invitations:
    """Of one plane. Given and taken back by its owner's thread, found and spent by the plane's.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._given: dict[bytes, Invited] = {}
        self._lock = threading.Lock()

    def give(self, number: bytes, peer: str, secret: bytes = b"") -> None:
        """Take note of one; the oldest of too many is taken back."""
        with self._lock:
            while len(self._given) >= MAX_INVITATIONS:
                del self._given[next(iter(self._given))]
            self._given[number] = Invited(peer, secret, self._clock() + INVITATION_S)

    def take_back(self, peer: str) -> None:
        """None of a peer's is good any more."""
        with self._lock:
            self._given = {number: invited for number, invited in self._given.items() if invited.peer != peer}

    def find(self, number: bytes) -> Invited | None:
        """Return whom one is for; None: it was never given, or is good no more."""
        with self._lock:
            invited = self._given.get(number)
        return invited if invited is not None and self._clock() <= invited.good_until else None

    def spend(self, number: bytes) -> None:
        """It was used."""
        with self._lock:
            self._given.pop(number, None)
