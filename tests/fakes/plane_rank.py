"""A rank that is a thread of this process, as far as it passes K/V: its planes, and who asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pagefleet_engine.executor.asked_planes import AskedDevice, PlaneRings
from pagefleet_engine.executor.asked_pool import close_all
from pagefleet_engine.executor.plane_server import PlaneServer
from pagefleet_engine.executor.plane_words import Withdraw
from pagefleet_engine.executor.rank_pages import StepFence
from pagefleet_engine.executor.ring import make_ring_pair
from pagefleet_kv.p2p.planes.local_device import LocalDevice


class PlaneRank:
    """`server` in its thread, until it is closed; `asked` reaches it."""

    def __init__(
        self,
        device: LocalDevice,
        num_finished: Callable[[], int],
        fence: StepFence,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rings = make_ring_pair(1 << 14)
        self.server = PlaneServer(device, self._rings, num_finished)
        self.asked = AskedDevice(PlaneRings(self._rings), "a rank", fence, is_over)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv planes")
        self._thread.start()

    def close(self) -> None:
        """End the thread, and close what both talk through."""
        self._is_closed = True
        self.asked.ask("", Withdraw(b""))  # of no plane: the server wakes and does nothing
        self._thread.join()
        close_all(self._rings.fds)

    def _run(self) -> None:
        while not self._is_closed:
            self.server.turn()
