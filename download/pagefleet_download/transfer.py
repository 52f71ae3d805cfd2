"""One file from a source into its part: from where it stopped, as often as it takes, until its bytes are right."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from contextlib import aclosing
from pathlib import Path
from threading import Lock

from pagefleet_download.errors import BadSettings, ChecksumMismatch, EndedEarly, Interrupted
from pagefleet_download.manifest import InstalledFile
from pagefleet_download.progress import ProgressMeter
from pagefleet_download.reading import Attempts, steady
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import Hasher, ModelSource, RemoteFile, WholeFiles

_CHUNK = 1 << 22
_WRITE_BYTES = 4 << 20
_REAL_PROGRESS = 1 << 20
"""An attempt that brought so much was a good one, however it ended."""
_TRIES = 2


class PartFile:
    """Its methods wait for the disk, except `close` and `size`: call them from a thread. They raise OSError.

    Any two of them may be called at once: when a download is cancelled, a write may still be on its way in its thread.
    """

    def __init__(self, path: Path, file: RemoteFile) -> None:
        self._path = path
        self._file = file
        self._descriptor: int | None = None
        self._closing = False
        self._lock = Lock()
        self._sha256: Hasher = hashlib.sha256()
        self._own = self._new_own()
        self.size = 0
        """Bytes that are here."""

    def open(self) -> None:
        """Open the file, and hash what is there already."""
        with self._lock:
            if self._closing:
                return
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            found = os.fstat(self._descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise BadSettings(f"{self._path} is not a file: remove it")
            # Without a tag nobody knows whether the rest would be of the same content.
            if found.st_size > self._file.size or not self._file.tag:
                os.ftruncate(self._descriptor, 0)
            while not self._closing and (data := os.read(self._descriptor, _CHUNK)):
                self._take(data)

    def write(self, data: bytes | bytearray) -> None:
        """Append; nothing once it is closed."""
        with self._lock:
            if self._descriptor is None:
                return
            left = memoryview(data)
            while left:
                count = os.write(self._descriptor, left)
                self._take(left[:count])
                left = left[count:]

    def reset(self) -> None:
        with self._lock:
            if self._descriptor is None:
                return
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            self._sha256, self._own, self.size = hashlib.sha256(), self._new_own(), 0

    def verified(self) -> InstalledFile | None:
        """What the file is, safe on the disk; None when its bytes are not the right ones."""
        with self._lock:
            file, sha256 = self._file, self._sha256.hexdigest()
            own = self._own.hexdigest() if self._own else sha256
            if self._descriptor is None or self.size != file.size or (file.digest and own != file.digest.hexdigest):
                return None
            os.fsync(self._descriptor)
            return InstalledFile(file.name, file.size, sha256, file.tag, file.folder)

    def close(self) -> None:
        """Keep what is there. Waits for a write that is on its way."""
        self._closing = True
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _new_own(self) -> Hasher | None:
        """For what the store tells, unless it is the SHA-256 that is computed anyway."""
        digest = self._file.digest
        return digest.hasher(self._file.size) if digest and digest.algorithm != "sha256" else None

    def _take(self, data: bytes | memoryview) -> None:
        self._sha256.update(data)
        if self._own:
            self._own.update(data)
        self.size += len(data)


class Transfer:
    """Files of one source, for one download."""

    def __init__(self, source: ModelSource, settings: DownloadSettings, meter: ProgressMeter) -> None:
        self._source = source
        self._settings = settings
        self._meter = meter

    async def fetch(self, file: RemoteFile, path: Path) -> InstalledFile:
        """Complete the part at `path`.

        Raises:
            StoreUnreachable: the source failed too often in a row.
            ChecksumMismatch: the file arrived twice with wrong bytes, or is shorter than the source says.
            OSError: the disk.
        """
        counted = 0
        if isinstance(self._source, WholeFiles) and not await asyncio.to_thread(path.exists):
            counted = await self._source.fetch(file, path, self._meter.add_bytes) or 0
        part = PartFile(path, file)
        try:
            await asyncio.to_thread(part.open)
            self._meter.add_found(part.size - counted)
            for _ in range(_TRIES):
                await self._receive(file, part)
                if installed := await asyncio.to_thread(part.verified):
                    self._meter.add_files()
                    return installed
                self._meter.add_bytes(-part.size)
                await asyncio.to_thread(part.reset)
        finally:
            part.close()
        raise ChecksumMismatch(
            f"{file.name} arrived {_TRIES} times with other bytes than the store says it has "
            f"({file.digest.algorithm if file.digest else 'size'}): upload it again, or look at proxies on the way"
        )

    async def _receive(self, file: RemoteFile, part: PartFile) -> None:
        attempts = Attempts(self._settings)
        while part.size < file.size:
            before = part.size
            try:
                await self._receive_once(file, part)
                if part.size < file.size:
                    raise EndedEarly(f"{file.name} ends before byte {file.size - 1}")
            except Interrupted as failure:
                if part.size - before >= _REAL_PROGRESS:
                    attempts.progress()
                await attempts.failed(failure)

    async def _receive_once(self, file: RemoteFile, part: PartFile) -> None:
        """Bytes that have arrived are written, however this ends."""
        start = part.size
        left = file.size - start
        waiting = bytearray()
        chunks = steady(self._source.read(file, start, file.size), file.name, self._settings.patience.stall)
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    waiting += chunk[:left]
                    self._meter.add_bytes(len(chunk[:left]))
                    left -= len(chunk[:left])
                    if len(waiting) >= _WRITE_BYTES or not left:
                        full, waiting = waiting, bytearray()  # first: the thread may outlive a cancelled wait
                        await asyncio.to_thread(part.write, full)
                    if not left:
                        return
        finally:
            part.write(waiting)
