"""A model's weights read where they lie, piece by piece and straight into memory: nothing of them comes to a disk.

The folder that `bring` made has all small files, and in a manifest where the weights are. Their digests are of whole
files, which nobody sees here: a piece is of the file that was looked at, by commit, ETag or digest, and has its length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

from pagefleet_download.errors import BadModel
from pagefleet_download.manifest import streamed_from
from pagefleet_download.open_source import downloadable, open_source
from pagefleet_download.outline import weights_of
from pagefleet_download.reading import read_range
from pagefleet_download.settings import DownloadSettings, settings_for
from pagefleet_download.source import ModelSource, RemoteFile

T = TypeVar("T")


class WeightStream:
    """Open between `__enter__` and `__exit__`, with an event loop in a thread of its own. Any thread may read.

    Args:
        folder: that `bring` made of a model whose weights stay where they are.
        environment: credentials and addresses.

    Raises:
        DownloadError: the store cannot be read, or has another model by now.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        manifest = streamed_from(folder)
        if manifest is None:
            raise BadModel(f"{folder} does not say where its weights are: give the model's name or URI")
        self._manifest, uri = manifest, manifest.source
        revision = self._manifest.facts.revision if uri.startswith("hf://") else self._manifest.requested or None
        self._settings: DownloadSettings = settings_for(uri, revision, None, environment)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="weights", daemon=True)
        self._stack = AsyncExitStack()
        self._source: ModelSource | None = None
        self.files: tuple[RemoteFile, ...] = ()
        """Of the weights."""

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._wait(self._open())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._wait(self._stack.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def read(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Return the bytes from `start` up to `stop`, all of them.

        Raises:
            DownloadError: they cannot be had, however often it is tried.
        """
        assert self._source is not None
        return self._wait(read_range(self._source, file, start, stop, self._settings))

    async def _open(self) -> None:
        source = open_source(downloadable(self._manifest.source), self._settings)
        self._source = await self._stack.enter_async_context(source)
        revision, self.files = await weights_of(self._source, self._settings)
        if revision != self._manifest.facts.revision:
            raise BadModel(f"{self._manifest.source} has changed since it was looked at: start again")

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
