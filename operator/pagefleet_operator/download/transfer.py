"""One file from a source into its part: from where it stopped, as often as it takes, until its bytes are right."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

from pagefleet_operator.download.attempts import Attempts
from pagefleet_operator.download.errors import ChecksumMismatch, Interrupted
from pagefleet_operator.download.manifest import InstalledFile
from pagefleet_operator.download.part_file import PartFile
from pagefleet_operator.download.progress import ProgressMeter
from pagefleet_operator.download.reading import steady
from pagefleet_operator.download.settings import DownloadSettings
from pagefleet_operator.download.source import ModelSource, RemoteFile

_WRITE_BYTES = 4 << 20
_REAL_PROGRESS = 1 << 20
"""An attempt that brought so much was a good one, however it ended."""
_TRIES = 2


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
            ChecksumMismatch: the file arrived twice with wrong bytes.
            OSError: the disk.
        """
        part = PartFile(path, file)
        try:
            await asyncio.to_thread(part.open)
            self._meter.add_bytes(part.size)
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
                    raise Interrupted(f"{file.name}: the transfer ended early")
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
