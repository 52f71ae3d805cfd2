"""One thread that does jobs in the order in which they came."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pagefleet_engine.kv_transfer.block_mover.jobs import Job


class Lane:
    """Runs `work` on each job; `work` must handle what goes wrong. `first` runs before any job."""

    def __init__(self, name: str, work: Callable[[Job], None], first: Callable[[], None] | None = None) -> None:
        self._work = work
        self._first = first
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Add a job; returns at once."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread once the jobs so far are done."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._first is not None:
            self._first()
        while (job := self._jobs.get()) is not None:
            self._work(job)
