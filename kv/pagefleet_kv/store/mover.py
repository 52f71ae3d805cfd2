"""Moves whole blocks between pages, host memory and a folder, in three threads; the thread that schedules only asks.

It decides nothing: which slot, which file and when is up to the connector, which keeps whatever a job touches until
`finished` tells that the job has ended.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

from pagefleet_kv.bell import Bell
from pagefleet_kv.errors import TransfersDead
from pagefleet_kv.port import KVPages
from pagefleet_kv.store.blob_store import BlobStore
from pagefleet_kv.store.block_io import BlockIO, CopyOutJob, FolderJob, Job, LoadJob, MoveDone, MoveError, ProbeJob
from pagefleet_kv.store.block_key import BlockKey

FOUND_AT_ONCE = 512
"""Of the blocks that a scan finds, so many are taken in between two steps: a few milliseconds."""

logger = logging.getLogger(__name__)


class BlockMover:
    """Does jobs on one worker's pages.

    Args:
        pages: of the worker.
        slots: host memory, slot after slot; empty where no job names one.
        store: the folder; None where no job names a key.
        scan: most blocks to look for in the folder when it starts, for `found`; None: it is not looked at.

    Attributes:
        block_bytes: of one block in memory.
        store: the folder. Only its figures may be read by the thread that schedules.
    """

    def __init__(
        self, pages: KVPages, slots: memoryview, store: BlobStore | None = None, scan: int | None = None
    ) -> None:
        self._io = BlockIO(pages, slots, store)
        self.block_bytes = pages.bytes_per_block
        self.store = store
        self._scan_most = scan
        self._bell = Bell()
        self._done: deque[MoveDone] = deque()
        self._found: deque[BlockKey] = deque()
        self._cancelled: set[int] = set()
        self._closing = threading.Event()
        self._has_crashed = False
        self._load = Lane("kv load", self._run_on_load_lane, self._crash)
        self._copy = Lane("kv copy", self._run, self._crash)
        self._disk = None if store is None else Lane("kv disk", self._run, self._crash, self._scan)

    @property
    def bell(self) -> int:
        """A file descriptor that is readable while `finished` has something to tell."""
        return self._bell.fileno()

    def ring(self) -> None:
        """Make the bell readable, for news that the connector has itself."""
        self._bell.ring()

    def start(self, job: Job) -> None:
        """Begin; returns at once."""
        match job:
            case LoadJob() | ProbeJob() | FolderJob(call="clear"):
                self._load.put(job)
            case CopyOutJob():
                self._copy.put(job)
            case _:
                self._put_on_disk_lane(job)

    def cancel(self, job_id: int) -> None:
        """Let a load that has not ended do so soon; the number is forgotten with its end."""
        self._cancelled.add(job_id)

    def finished(self) -> Sequence[MoveDone]:
        """Return the jobs that ended since the last call. A load that was cancelled ends without an error.

        Raises:
            TransfersDead: a thread has ended by a mistake of ours, so its jobs would never end.
        """
        self._bell.silence()
        if self._has_crashed:
            raise TransfersDead("a thread that moves K/V has ended")
        done = [self._done.popleft() for _ in range(len(self._done))]
        self._cancelled.difference_update(move.job_id for move in done)
        return done

    def found(self) -> list[BlockKey]:
        """Return what the scan has found, least recently used first: a part of it, and the bell rings for the rest."""
        found = [self._found.popleft() for _ in range(min(FOUND_AT_ONCE, len(self._found)))]
        if self._found:
            self._bell.ring()
        return found

    def close(self) -> None:
        """End the threads; what has not begun is not done."""
        if self._closing.is_set():
            return
        self._closing.set()
        for lane in (self._load, self._copy, self._disk):
            if lane is not None:
                lane.close()
        if self.store is not None:
            self.store.close()
        self._bell.close()

    # --- in the threads

    def _run_on_load_lane(self, job: Job) -> None:
        if isinstance(job, FolderJob) and job.call == "clear":  # the loads before it have ended
            self._put_on_disk_lane(job)
        else:
            self._run(job)

    def _run(self, job: Job) -> None:
        if self._closing.is_set():
            return
        moved, error = 0, None
        try:
            with contextlib.closing(self._io.steps(job)) as steps:
                for count in steps:
                    moved += count
                    if self._closing.is_set() or job.job_id in self._cancelled:
                        break
        except MoveError as failure:
            error = str(failure)
        except (OSError, RuntimeError) as failure:  # of a device
            error = str(failure)
            logger.warning("blocks of K/V could not be moved: %s", error)
        self._done.append(MoveDone(job.job_id, moved, error))
        self._bell.ring()

    def _crash(self) -> None:
        self._has_crashed = True
        self._bell.ring()

    def _scan(self) -> None:
        if self.store is None or self._scan_most is None:
            return
        self._found.extend(self.store.scan(self._scan_most, self._closing.is_set))
        self._bell.ring()

    def _put_on_disk_lane(self, job: Job) -> None:
        assert self._disk is not None, "a job for a folder, and there is none"
        self._disk.put(job)


logger = logging.getLogger(__name__)


class Lane:
    """One thread, which runs `work` on each job in the order in which they came, and `first` before any.

    `work` must handle what goes wrong;
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
