"""What the thread that schedules asks of the mover, and how each job moves its blocks, piece by piece.

Jobs of one lane run in order, lanes side by side, each in a thread of the mover's:

load lane    LoadJob ProbeJob         what requests wait for
copy lane    CopyOutJob               pages to host memory: holds blocks of the pool, so nothing slow goes before it
disk lane    SpillJob StoreJob FolderJob, and the scan of the folder before them
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_kv.port import KVPages, PagesCopy
from pagefleet_kv.store.blob_store import BlobStore
from pagefleet_kv.store.block_key import BlockKey, block_keys
from pagefleet_kv.store.prefix import longest_prefix


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill blocks of the pool, in this order; it ends at the first that cannot be filled."""

    job_id: int
    blocks: Sequence[int]
    sources: Sequence[int | BlockKey]
    """For each block: a slot of host memory, or the key of a block on disk."""


@dataclass(frozen=True, slots=True)
class CopyOutJob:
    """Copy blocks of the pool to slots of host memory."""

    job_id: int
    blocks: Sequence[int]
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class SpillJob:
    """Write a slot of host memory to the folder."""

    job_id: int
    slot: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Write blocks of the pool to the folder, but for those that it has."""

    job_id: int
    blocks: Sequence[int]
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """Count the blocks by which the folder makes a prefix of `first` blocks longer; `hashes`: of those after them."""

    job_id: int
    first: int
    hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class FolderJob:
    """Ask the folder to delete blocks; or to delete all, once the loads asked for before have ended."""

    job_id: int
    call: Literal["drop", "clear"]
    keys: Sequence[BlockKey] = ()


Job = LoadJob | CopyOutJob | SpillJob | StoreJob | ProbeJob | FolderJob


@dataclass(frozen=True, slots=True)
class MoveDone:
    """A job that ended; nothing of it touches the pages any more."""

    job_id: int
    num_blocks: int
    """Leading blocks that were moved and checked."""
    error: str | None = None


PIECE_BYTES = 8 * 1024 * 1024
"""Copied at once: enough for the speed of memory, and little enough that a load that is cancelled ends soon."""
COPIES_UNDER_WAY = 8


class MoveError(Exception):
    """A block cannot be moved; those before it were."""


class BlockIO:
    """The jobs on one worker's pages, slots of host memory and a folder. See `BlockMover`."""

    def __init__(self, pages: KVPages, slots: memoryview, store: BlobStore | None) -> None:
        self._pages = pages
        self._slots = slots
        self._given_store = store
        self._block_bytes = pages.bytes_per_block
        self._piece = max(1, PIECE_BYTES // self._block_bytes)

    def steps(self, job: Job) -> Generator[int, None, None]:
        """Do the job; yields the number of blocks with each piece that is done.

        Nothing of it touches the pages between two pieces of a job that is given up and closed.

        Raises:
            MoveError: a block cannot be moved.
            OSError, RuntimeError: of the device.
        """
        match job:
            case LoadJob():
                yield from self._load(job)
            case CopyOutJob():
                yield from self._copy_out(job)
            case StoreJob():
                yield from self._store_pages(job)
            case SpillJob():
                yield int(self._store.write(job.key, self._slot_bytes(job.slot, 1)))
            case ProbeJob():
                yield self._probe(job)
            case FolderJob():
                yield from self._delete(job)

    @property
    def _store(self) -> BlobStore:
        assert self._given_store is not None, "a job for a folder, and there is none"
        return self._given_store

    def _load(self, job: LoadJob) -> Iterator[int]:
        copies = _Copies()
        try:
            for start, stop in _pieces(job.sources, self._piece):
                blocks, first = job.blocks[start:stop], job.sources[start]
                if isinstance(first, int):
                    copies.add(self._pages.write(self._slot_bytes(first, stop - start), blocks), stop - start)
                    yield from copies.surplus()
                else:
                    yield from copies.rest()
                    yield from self._load_from_disk(blocks, job.sources[start:stop])
            yield from copies.rest()
        finally:
            copies.wait()

    def _load_from_disk(self, blocks: Sequence[int], keys: Sequence[int | BlockKey]) -> Iterator[int]:
        size = self._block_bytes
        buffer = memoryview(bytearray(len(keys) * size))
        error, num_read = None, 0
        for key in keys:
            assert isinstance(key, bytes)
            error = self._store.read(key, buffer[num_read * size : (num_read + 1) * size])
            if error is not None:
                break
            num_read += 1
        if num_read:
            self._pages.write(buffer[: num_read * size], blocks[:num_read]).wait()
            yield num_read
        if error is not None:
            raise MoveError(error)

    def _copy_out(self, job: CopyOutJob) -> Iterator[int]:
        copies = _Copies()
        try:
            for start, stop in _pieces(job.slots, self._piece):
                into = self._slot_bytes(job.slots[start], stop - start)
                copies.add(self._pages.read(job.blocks[start:stop], into), stop - start)
                yield from copies.surplus()
            yield from copies.rest()
        finally:
            copies.wait()

    def _store_pages(self, job: StoreJob) -> Iterator[int]:
        buffer = memoryview(bytearray(self._block_bytes))
        for block, key in zip(job.blocks, job.keys, strict=True):
            if not self._store.contains(key):
                self._pages.read([block], buffer).wait()
                self._store.write(key, buffer)
            yield 1

    def _probe(self, job: ProbeJob) -> int:
        def has(group: int, index: int) -> bool:
            (key,) = block_keys([job.hashes[index - job.first]], group)
            return self._store.contains(key)

        return longest_prefix(self._store.shape, job.first, job.first + len(job.hashes), has) - job.first

    def _delete(self, job: FolderJob) -> Iterator[int]:
        if job.call == "clear":
            self._store.clear()
        for key in job.keys:
            self._store.remove(key)
            yield 1

    def _slot_bytes(self, slot: int, count: int) -> memoryview:
        return self._slots[slot * self._block_bytes : (slot + count) * self._block_bytes]


class _Copies:
    """Copies under way, in order, with the number of blocks of each."""

    def __init__(self) -> None:
        self._copies: deque[tuple[PagesCopy, int]] = deque()

    def add(self, copy: PagesCopy, num_blocks: int) -> None:
        self._copies.append((copy, num_blocks))

    def surplus(self) -> Iterator[int]:
        """Wait for the oldest while too many are under way."""
        return self._wait_down_to(COPIES_UNDER_WAY)

    def rest(self) -> Iterator[int]:
        """Wait for all."""
        return self._wait_down_to(0)

    def wait(self) -> None:
        """Wait for all, whatever comes of it."""
        for _ in self.rest():
            pass

    def _wait_down_to(self, count: int) -> Iterator[int]:
        while len(self._copies) > count:
            copy, num_blocks = self._copies.popleft()
            copy.wait()
            yield num_blocks


def _pieces(places: Sequence[int | BlockKey], most: int) -> Iterator[tuple[int, int]]:
    """Cut into ranges of at most `most` places: slots that follow each other, or keys."""
    start = 0
    for index in range(1, len(places) + 1):
        if index < len(places) and index - start < most and _follows(places[index - 1], places[index]):
            continue
        yield start, index
        start = index


def _follows(before: int | BlockKey, place: int | BlockKey) -> bool:
    if isinstance(before, int):
        return isinstance(place, int) and place == before + 1
    return not isinstance(place, int)
