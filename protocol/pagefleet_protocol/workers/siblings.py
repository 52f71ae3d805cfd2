"""Processes that serve one port ask each other, so that whichever is asked from outside can answer for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

TIMEOUT_S = 2.0
"""For all siblings: one that hangs is left out."""
MAX_BYTES = 16 * 2**20
FIGURES, CONSOLE = b"figures\n", b"console\n"
"""Questions: for a process's exposition, and for its part of what the console shows."""


def answer_path(folder: Path, index: int) -> Path:
    """Return where a process answers its siblings, in the folder that is private to them."""
    return folder / f"{index}.sock"


class Siblings:
    """This process's ear and mouth.

    Args:
        folder: private to the processes.
        index: of this one.
        num: of processes.
        own: by question, what returns its answer.
        timeout: seconds for all siblings to answer.
    """

    def __init__(
        self,
        folder: Path,
        index: int,
        num: int,
        own: Mapping[bytes, Callable[[], bytes]] = MappingProxyType({}),
        timeout: float = TIMEOUT_S,
    ) -> None:
        self.num_silent = 0
        """Times that a sibling was left out of a sum."""
        self._path = answer_path(folder, index)
        self._sibling_paths: Sequence[Path] = [answer_path(folder, other) for other in range(num) if other != index]
        self._own = dict(own)
        self._timeout = timeout
        self._server: asyncio.Server | None = None

    def answer(self, question: bytes, source: Callable[[], bytes]) -> None:
        """Answer a question by what `source` returns."""
        self._own[question] = source

    async def start(self) -> None:
        """Begin to answer siblings."""
        self._path.unlink(missing_ok=True)  # of the process that had this place before
        self._server = await asyncio.start_unix_server(self._tell, self._path)
        os.chmod(self._path, 0o600)

    async def stop(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._path.unlink(missing_ok=True)

    async def ask(self, question: bytes) -> list[bytes]:
        """Return the answers of the siblings that give one in time."""
        tasks = [asyncio.create_task(_ask(path, question)) for path in self._sibling_paths]
        await asyncio.wait(tasks, timeout=self._timeout)
        texts = []
        for task in tasks:
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None:
                texts.append(task.result())
        self.num_silent += len(tasks) - len(texts)
        return texts

    async def _tell(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            async with asyncio.timeout(self._timeout):
                answer = self._own.get(await reader.readline())
                if answer is not None:
                    writer.write(answer())
                    await writer.drain()
        writer.close()


async def _ask(path: Path, question: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(question)
        text = bytearray()
        while data := await reader.read(2**16):
            text += data
            if len(text) > MAX_BYTES:
                raise ConnectionError("a process says too much")
        return bytes(text)
    finally:
        writer.close()
