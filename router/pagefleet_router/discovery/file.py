"""The endpoints file, re-read whenever it changes.

It is polled: a stat each quarter of a second costs nothing and works on every file system, mounted ConfigMaps too.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from pagefleet_protocol.endpoints import Endpoint, EndpointsFileError, decode_endpoints

from pagefleet_router.config import check_engine_url
from pagefleet_router.discovery.source import EndpointSink
from pagefleet_router.errors import ConfigError

logger = logging.getLogger(__name__)

_POLL_S = 0.25


class FileSource:
    """Follows one file. While it is missing or wrong the last good list stays, and the log says so once per content."""

    def __init__(self, path: Path, poll_s: float = _POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s
        self._seen: tuple[int, int, int] | str | None = None

    async def run(self, sink: EndpointSink) -> None:
        """Report the file's list, and again after every change."""
        while True:
            endpoints = self.read_if_changed()
            if endpoints is not None:
                sink.replace(endpoints)
            elif isinstance(self._seen, str):
                sink.explain(self._seen)
            await asyncio.sleep(self._poll_s)

    def read_if_changed(self) -> tuple[Endpoint, ...] | None:
        """Return the new list; None when nothing changed or the change is no valid list."""
        try:
            status = os.stat(self._path)
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp == self._seen:
                return None
            self._seen = stamp
            return _decode(self._path.read_bytes())
        except OSError as error:
            reason = f"the endpoints file cannot be read ({error.strerror})"
            if self._seen != reason:
                logger.warning("%s; the last list stays in force", reason)
            self._seen = reason
        except (EndpointsFileError, ConfigError) as error:
            logger.warning("%s; the last list stays in force", error)
        return None


def _decode(data: bytes) -> tuple[Endpoint, ...]:
    endpoints = decode_endpoints(data).endpoints
    for endpoint in endpoints:
        check_engine_url(endpoint.url)
        # Ids are sent to clients in a header.
        if not endpoint.id.isascii() or not endpoint.id.isprintable() or not endpoint.id.strip():
            raise EndpointsFileError(f"endpoints file: id {endpoint.id!r} is not printable ASCII")
    return endpoints
