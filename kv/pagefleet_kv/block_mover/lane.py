"""One thread that does jobs in the order in which they came."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from pagefleet_kv.block_mover.jobs import Job

logger = logging.getLogger(__name__)


class Lane:
    """Runs `work` on each job; `work` must handle what goes wrong. `first` runs before any job.

    `crashed` is called where one of them did not, by a mistake of ours: no job of this lane ends any more.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Job], None],
        crashed: Callable[[], None],
        first: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._crashed = crashed
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
        try:
            if self._first is not None:
                self._first()
            while (job := self._jobs.get()) is not None:
                self._work(job)
        except Exception:  # the thread's top: the engine ends rather than wait for jobs that never end
            logger.exception("no K/V is moved any more")
            self._crashed()
