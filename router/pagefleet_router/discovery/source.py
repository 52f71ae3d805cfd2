"""What a source of endpoints is, and the two that need nothing but this machine."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pagefleet_protocol.endpoints import Endpoint, EndpointsFileError, decode_endpoints

from pagefleet_router.config import check_engine_url
from pagefleet_router.errors import ConfigError

logger = logging.getLogger(__name__)


class EndpointSink(Protocol):
    """Takes what a source finds."""

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Take over a new list."""

    def explain(self, reason: str) -> None:
        """Note why there is no list. Strangers may read the reason: it names no address."""


class EndpointSource(Protocol):
    """Reports the list of engines, now and whenever it changes."""

    async def run(self, sink: EndpointSink) -> None:
        """Report until cancelled. While nothing can be read, the last list stays in force."""


class StaticSource:
    """Engines that never change. Their ids are their host and port."""

    def __init__(self, urls: Sequence[str], model: str) -> None:
        self._endpoints = tuple(Endpoint(url.removeprefix("http://"), url, model) for url in dict.fromkeys(urls))

    async def run(self, sink: EndpointSink) -> None:
        """Report once."""
        sink.replace(self._endpoints)


# The endpoints file, re-read whenever it changes.
# It is polled: a stat each quarter of a second costs nothing and works on every file system, mounted ConfigMaps too.
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
