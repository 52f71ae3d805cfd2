"""A folder of blobs, one file a block: written whole or not at all, and checked whenever it is read.

    FOLDER/manifest.json       the shape of all blocks
    FOLDER/3f/3fa2….kv         header and one block; the name is the block's key
    FOLDER/unfinished/…        what is being written; renamed once it is complete

Nothing is forced to the disk: a crash can lose or tear a file, and the checksum finds it out. A file that is wrong is
deleted; the log has one of them at a time. A disk that is full or read-only is told of once and left alone for a while.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from isal.isal_zlib import crc32
from pagefleet_protocol.block_hash import HASH_BYTES
from pagefleet_protocol.kv_blob import HEADER_BYTES, BlobError, BlobHeader, KvShape, decode_header

from pagefleet_kv.store.block_key import BlockKey, group_of, hash_of
from pagefleet_kv.store.manifest import FolderClaim

RETRY_S = 30.0
DAMAGE_TOLD_S = 60.0
"""Between two lines in the log about files that are wrong, however many there are."""
_SUFFIX = ".kv"
_UNFINISHED = "unfinished"
_FILE_SYSTEM_BLOCK = 4096

logger = logging.getLogger(__name__)


class BlobStore:
    """Blocks of `block_bytes` in a folder that was claimed for their shape.

    One thread may write, remove, clear and scan; others may read and ask meanwhile.
    """

    def __init__(
        self,
        claim: FolderClaim,
        shape: KvShape,
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`claim`: of the folder, for this shape; it is released by `close`."""
        self.shape = shape
        self.block_bytes = block_bytes
        self.file_bytes = -(-(HEADER_BYTES + block_bytes) // _FILE_SYSTEM_BLOCK) * _FILE_SYSTEM_BLOCK
        """What one block takes on disk."""
        self.num_writes = 0
        """Blocks that were written."""
        self.num_damaged = 0
        """Files that were found to be wrong, and deleted."""
        self.num_failed_writes = 0
        """Blocks that the disk did not take."""
        self._claim = claim
        self._folder = claim.folder
        self._compatibility = shape.compatibility
        self._clock = clock
        self._quiet_until: float | None = None
        self._tell_damage_at = float("-inf")
        self._own = secrets.token_hex(8)

    @property
    def takes_writes(self) -> bool:
        """False for a while after the disk did not take one."""
        return self._quiet_until is None or self._clock() >= self._quiet_until

    def contains(self, key: BlockKey) -> bool:
        """True if there is a file for the block; whether it is right, reading it will tell."""
        return self._path(key).exists()

    def write(self, key: BlockKey, payload: memoryview) -> bool:
        """Keep one block; False when the disk cannot, or could not a short while ago."""
        if not self.takes_writes:
            self.num_failed_writes += 1
            return False
        header = BlobHeader(
            self._compatibility, hash_of(key), 0, 1, len(payload), crc32(payload), group_of(key)
        ).encode()
        unfinished = self._folder / _UNFINISHED / self._own
        try:
            self._write_file(unfinished, header, payload, self._path(key))
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            self._go_quiet(error)
            return False
        self.num_writes += 1
        if self._quiet_until is not None:
            self._quiet_until = None
            logger.info("%s takes K/V again", self._folder)
        return True

    def read(self, key: BlockKey, into: memoryview) -> str | None:
        """Fill `into` with one block; returns what is wrong, else None. A block that is wrong is there no more."""
        try:
            self._read_file(key, into)
        except FileNotFoundError:
            return "the file is gone"
        except (BlobError, OSError) as error:
            self._remove_damaged(key, error)
            return str(error)
        return None

    def remove(self, key: BlockKey) -> None:
        """Delete a block, if it is there."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def clear(self) -> None:
        for entry in self._files():
            with contextlib.suppress(OSError):
                os.unlink(entry.path)

    def scan(self, most: int, stopped: Callable[[], bool]) -> list[BlockKey]:
        """Return what is there, least recently used first; deletes what is over `most`, torn or unfinished.

        For one who has the folder alone. Memory is bounded by `most`. Ends early when `stopped`.
        """
        shutil.rmtree(self._folder / _UNFINISHED, ignore_errors=True)
        found: list[tuple[int, BlockKey]] = []
        for entry in self._files():
            if stopped():
                break
            key = _key_of(entry.name)
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if key is None or status.st_size != HEADER_BYTES + self.block_bytes:
                    os.unlink(entry.path)
                    continue
                heapq.heappush(found, (status.st_mtime_ns, key))
            if len(found) > most:
                self.remove(heapq.heappop(found)[1])
        return [key for _, key in sorted(found)]

    def close(self) -> None:
        """Let others claim the folder; may be called twice."""
        self._claim.release()

    def _write_file(self, unfinished: Path, header: bytes, payload: memoryview, path: Path) -> None:
        unfinished.parent.mkdir(exist_ok=True)
        with open(unfinished, "wb", buffering=0) as file:
            for part in (memoryview(header), payload):
                written = 0
                while written < len(part):
                    written += file.write(part[written:])
        path.parent.mkdir(exist_ok=True)
        unfinished.replace(path)

    def _read_file(self, key: BlockKey, into: memoryview) -> None:
        with open(self._path(key), "rb", buffering=0) as file:
            header = decode_header(file.read(HEADER_BYTES), self._compatibility, self.block_bytes)
            if header.name != hash_of(key) or header.group != group_of(key):
                raise BlobError("the file holds another block")
            filled = 0
            while filled < len(into):
                count = file.readinto(into[filled:])
                if not count:
                    raise BlobError(f"the file ends after {filled} of {len(into)} bytes")
                filled += count
            if crc32(into) != header.checksum:
                raise BlobError("the block is damaged")
            with contextlib.suppress(OSError):
                os.utime(file.fileno())  # so that the next start knows what was used last

    def _remove_damaged(self, key: BlockKey, error: BlobError | OSError) -> None:
        self.num_damaged += 1
        self.remove(key)
        if self._clock() >= self._tell_damage_at:
            self._tell_damage_at = self._clock() + DAMAGE_TOLD_S
            logger.warning("%s was of no use (%s): deleted, its tokens are computed again", self._path(key), error)

    def _go_quiet(self, error: OSError) -> None:
        self.num_failed_writes += 1
        if self._quiet_until is None:
            logger.warning(
                "%s takes no K/V (%s): going on without, trying again every %.0f s",
                self._folder,
                error.strerror,
                RETRY_S,
            )
        self._quiet_until = self._clock() + RETRY_S

    def _files(self) -> Iterator[os.DirEntry[str]]:
        for number in range(256):
            with contextlib.suppress(OSError), os.scandir(self._folder / f"{number:02x}") as entries:
                yield from (entry for entry in entries if entry.name.endswith(_SUFFIX))

    def _path(self, key: BlockKey) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}{_SUFFIX}"


def _key_of(name: str) -> BlockKey | None:
    try:
        key = bytes.fromhex(name.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return BlockKey(key) if HASH_BYTES <= len(key) <= HASH_BYTES + 1 else None
