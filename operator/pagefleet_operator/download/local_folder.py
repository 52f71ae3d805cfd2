"""`file:///folder`: a model that is on this machine already, to be looked at in place or copied."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pagefleet_operator.download.errors import AccessDenied, BadModel, ModelNotFound, disk_error
from pagefleet_operator.download.source import Listing, RemoteFile

_CHUNK = 1 << 22


class LocalSource:
    """The files directly in one folder. Links that lead out of it are not followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def list_files(self) -> Listing:
        """There is no revision; a file's tag is the time of its last change."""
        return Listing("", await asyncio.to_thread(self._list))

    async def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        """Reads in a thread."""
        try:
            with await asyncio.to_thread((self._folder / file.name).open, "rb") as handle:
                handle.seek(start)
                while start < stop and (chunk := await asyncio.to_thread(handle.read, min(_CHUNK, stop - start))):
                    start += len(chunk)
                    yield chunk
        except PermissionError as error:
            raise _unreadable(error) from error
        except OSError as error:
            raise disk_error(self._folder / file.name, error) from error

    def _list(self) -> tuple[RemoteFile, ...]:
        try:
            names = sorted(os.listdir(self._folder))
            top = self._folder.resolve(strict=True)
            return tuple(file for name in names if (file := self._look(top, name)))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ModelNotFound(
                f"{self._folder} is not a folder: give a model folder in Hugging Face layout"
            ) from error
        except PermissionError as error:
            raise _unreadable(error) from error

    def _look(self, top: Path, name: str) -> RemoteFile | None:
        path = self._folder / name
        if path.is_symlink() and not path.resolve().is_relative_to(top):
            raise BadModel(
                f"{path} is a link that leads out of the folder: give a folder that has the files themselves"
            )
        if not path.exists():
            return None
        found = path.stat()
        return RemoteFile(name, found.st_size, f"mtime:{found.st_mtime_ns}") if stat.S_ISREG(found.st_mode) else None


def _unreadable(error: PermissionError) -> AccessDenied:
    return AccessDenied(f"{error.filename} may not be read by this user: change its permissions")


@asynccontextmanager
async def open_folder(folder: Path) -> AsyncIterator[LocalSource]:
    """Nothing stays open."""
    yield LocalSource(folder)
