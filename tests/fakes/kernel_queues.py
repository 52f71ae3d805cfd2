"""Devices that run one kernel after another, in the order of their launches, as CUDA may do with any."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass


@dataclass(eq=False)
class Kernel:
    """Has a part on each of several devices, which spins until all of them run."""

    num_parts: int
    on_run: Callable[[], None]
    has_run: bool = False


class KernelQueues:
    """All devices of a world."""

    def __init__(self) -> None:
        self._queues: dict[Hashable, deque[Kernel]] = {}
        self._kernels: dict[Hashable, Kernel] = {}
        self._lock = threading.RLock()

    def kernel(self, name: Hashable, num_parts: int, on_run: Callable[[], None] = lambda: None) -> Kernel:
        """The kernel of a name, the same for all who have a part of it."""
        with self._lock:
            return self._kernels.setdefault(name, Kernel(num_parts, on_run))

    def launch(self, device: Hashable, kernel: Kernel) -> None:
        """Put a part behind all that the device was given before."""
        with self._lock:
            self._queues.setdefault(device, deque()).append(kernel)
            while self._run_one():
                pass

    def abort(self, device: Hashable, kernel: Kernel) -> None:
        """Take a part away, if it has not run."""
        with self._lock:
            if kernel in self._queues.get(device, ()):
                self._queues[device].remove(kernel)
            while self._run_one():
                pass

    def has_left(self, device: Hashable, kernel: Kernel) -> bool:
        """Whether a part that was launched is on the device no more."""
        with self._lock:
            return kernel not in self._queues[device]

    @property
    def num_waiting(self) -> int:
        """Parts that were launched and have not run."""
        with self._lock:
            return sum(map(len, self._queues.values()))

    def _run_one(self) -> bool:
        heads = [queue[0] for queue in self._queues.values() if queue]
        for kernel in heads:
            if heads.count(kernel) == kernel.num_parts:
                for queue in self._queues.values():
                    if queue and queue[0] is kernel:
                        queue.popleft()
                kernel.has_run = True
                kernel.on_run()
                return True
        return False
