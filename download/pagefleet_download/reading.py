"""Reading from a source with everything that can go wrong on the way: stalls, small files, many at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from pagefleet_protocol.model_config.fields import ModelConfigError, json_object

from pagefleet_download.errors import BadModel, ChecksumMismatch, EndedEarly, Interrupted, StoreUnreachable
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import ModelSource, RemoteFile

T = TypeVar("T")


class Attempts:
    """Counts failures in a row of one piece of work, and pauses after each."""

    def __init__(self, settings: DownloadSettings) -> None:
        self._patience = settings.patience
        self._sleep = settings.host.sleep
        self._num_failures = 0

    def progress(self) -> None:
        """The work advanced: failures count from the beginning again."""
        self._num_failures = 0

    async def failed(self, failure: Interrupted) -> None:
        """Pause before the next attempt.

        Raises:
            StoreUnreachable: that was the last.
            ChecksumMismatch: it was, and the file is shorter than its store says.
        """
        patience = self._patience
        self._num_failures += 1
        if self._num_failures >= patience.attempts:
            told = f"{failure} ({self._num_failures} attempts)"
            if isinstance(failure, EndedEarly):
                raise ChecksumMismatch(
                    f"{told}, and the store lists more: upload the file again, or name another mirror"
                ) from failure
            raise StoreUnreachable(told) from failure
        longest = min(patience.backoff_first * 2 ** (self._num_failures - 1), patience.backoff_most)
        # Pods that started together must not come back together.
        pause = longest * random.uniform(0.5, 1.0)  # noqa: S311 - nothing secret
        if failure.retry_after is not None:
            pause = max(pause, min(failure.retry_after, patience.retry_after_most))
        await self._sleep(pause)


async def persist(work: Callable[[], Awaitable[T]], settings: DownloadSettings) -> T:
    """Do the work until it is not interrupted.

    Raises:
        StoreUnreachable, ChecksumMismatch: it was, too often.
    """
    attempts = Attempts(settings)
    while True:
        try:
            return await work()
        except Interrupted as failure:
            await attempts.failed(failure)


async def steady(chunks: AsyncGenerator[bytes], name: str, stall: float) -> AsyncGenerator[bytes]:
    """Yield the chunks; Interrupted when none comes for `stall` seconds."""
    async with aclosing(chunks):
        while True:
            try:
                async with asyncio.timeout(stall):
                    chunk = await anext(chunks)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise Interrupted(f"{name}: no byte came for {stall:g} s") from error
            yield chunk


async def read_range(source: ModelSource, file: RemoteFile, start: int, stop: int, settings: DownloadSettings) -> bytes:
    """The bytes from `start` up to `stop`, all of them."""

    async def attempt() -> bytes:
        data = bytearray()
        async with aclosing(steady(source.read(file, start, stop), file.name, settings.patience.stall)) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) >= stop - start:
                    break
        if len(data) < stop - start:
            raise EndedEarly(f"{file.name} ends before byte {stop - 1}")
        del data[stop - start :]
        return bytes(data)

    return await persist(attempt, settings)


async def read_json(source: ModelSource, file: RemoteFile, most: int, settings: DownloadSettings) -> dict[str, Any]:
    """The JSON object in a file of at most `most` bytes.

    Raises:
        BadModel: it is larger, or holds something else.
    """
    if not 0 < file.size <= most:
        raise BadModel(f"{file.name} has {file.size} bytes; it must have some, and at most {most}: repair the model")
    try:
        return json_object(await read_range(source, file, 0, file.size, settings), file.name)
    except ModelConfigError as error:
        raise BadModel(str(error)) from None


async def side_by_side(work: Callable[[T], Awaitable[None]], items: Iterable[T], most: int) -> None:
    """Work on all of the items, at most `most` at a time. The first error ends the others, and is raised."""
    places = asyncio.Semaphore(most)

    async def one(item: T) -> None:
        async with places:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for item in items:
                group.create_task(one(item))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
