"""Between the leader and planes on devices of this machine's ranks: what they are asked, and what they tell.

In a thread of its own: a rank may make no room for a while, and a step's plan must not wait for that.
"""

from __future__ import annotations

import logging
import select
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from pagefleet_engine.executor.asked_planes import PlaneWire
from pagefleet_engine.ranks.doorbell import Doorbell

_log = logging.getLogger(__name__)


class PlaneRelay:
    """Runs from its construction to `close`.

    Args:
        wires: to the planes of each rank.
        tell: takes what those of a rank tell.
        fail: is called where nothing is passed on any more.
    """

    def __init__(
        self,
        wires: Mapping[int, PlaneWire],
        tell: Callable[[int, Sequence[bytes]], None],
        fail: Callable[[], None],
    ) -> None:
        self._wires = wires
        self._tell = tell
        self._fail = fail
        self._asked: deque[tuple[int, Sequence[bytes]]] = deque()
        self._is_over = threading.Event()
        self._wake = Doorbell()
        self._bells = select.poll()
        for bell in (self._wake.fileno(), *(wire.bell for wire in wires.values())):
            self._bells.register(bell, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="plane relay", daemon=True)
        self._thread.start()

    def ask(self, rank: int, parts: Sequence[bytes]) -> None:
        """Have planes of a rank asked for something, after what was asked before."""
        self._asked.append((rank, parts))
        self._wake.ring()

    def close(self) -> None:
        """End it; call this once."""
        self._is_over.set()
        self._wake.ring()
        self._thread.join()
        self._wake.close()

    def _run(self) -> None:
        try:
            while True:
                self._bells.poll()
                self._wake.take()
                while self._asked:
                    rank, parts = self._asked.popleft()
                    self._wires[rank].send(parts, self._take_in)
                self._take_in()
        except _Over:
            return
        except Exception:  # the thread's top: the leader would wait for answers for ever
            _log.exception("no K/V is passed any more")
            self._fail()

    def _take_in(self) -> None:
        """Pass on what planes tell; also while one makes no room, as it may wait for that."""
        if self._is_over.is_set():
            raise _Over
        for rank, wire in self._wires.items():
            while (parts := wire.receive(0)) is not None:
                self._tell(rank, [*map(bytes, parts)])


class _Over(Exception):
    """It was closed."""
