"""From a URI to the store that has the model."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

from pagefleet_protocol.model_uri import ModelUri, parse_model_uri
from pydantic_core import PydanticCustomError

from pagefleet_download.errors import AccessDenied, BadModel, BadSettings, ModelNotFound, disk_error
from pagefleet_download.hub import open_hub
from pagefleet_download.modelscope import open_modelscope
from pagefleet_download.object_store import open_object_store
from pagefleet_download.registry import open_registry
from pagefleet_download.selection import choose_gguf, top_names
from pagefleet_download.settings import DownloadSettings
from pagefleet_download.source import Listing, ModelSource, RemoteFile, WholeFiles
from pagefleet_download.web_folder import open_web_folder

_CHUNK = 1 << 22


def downloadable(uri: str) -> ModelUri:
    """Take a URI apart.

    Raises:
        BadSettings: it is none, or one of what is mounted and never downloaded.
    """
    try:
        parsed = parse_model_uri(uri)
    except PydanticCustomError as error:
        raise BadSettings(str(error)) from error
    if not parsed.fetchable and parsed.scheme != "file":
        raise BadSettings(
            f"{parsed.scheme}:// is not downloaded: give hf://, modelscope://, s3://, gs://, oci://, https:// or file://"
        )
    return parsed


def open_source(uri: ModelUri, settings: DownloadSettings) -> AbstractAsyncContextManager[ModelSource]:
    """The model's store, for as long as the context lasts.

    Raises:
        BadSettings: the settings do not fit the store.
    """
    if settings.revision and not uri.has_revisions:
        raise BadSettings(f"a revision is of a repository; {uri.scheme}:// has none: leave it out")
    match uri.scheme:
        case "hf" | "modelscope":
            return _open_repository(uri, settings)
        case "oci":
            return open_registry(uri.path)
        case "https" | "http":
            return open_web_folder(uri.text, settings)
        case "s3" | "gs":
            return open_object_store(uri.scheme, uri.path, settings)
        case _:
            return open_folder(Path(uri.local_path))


@asynccontextmanager
async def _open_repository(uri: ModelUri, settings: DownloadSettings) -> AsyncIterator[ModelSource]:
    of_hub = open_hub if uri.scheme == "hf" else open_modelscope
    async with of_hub(uri.repository, settings) as repository:
        yield repository if uri.gguf is None else ChosenGguf(repository, uri.gguf)


class ChosenGguf:
    """One model in GGUF of a repository of several: as if there were no other files, and no folders."""

    def __init__(self, repository: ModelSource, gguf: str) -> None:
        """`gguf`: as `choose_gguf` has it."""
        self._repository, self._gguf = repository, gguf
        self._there: dict[str, RemoteFile] = {}

    async def list_files(self) -> Listing:
        """Raises BadModel where none of the files is meant, or several."""
        listing = await self._repository.list_files()
        names = [file.name for file in listing.files]
        top_names(names)  # refuses names that lead out of the folder
        chosen = set(choose_gguf(names, self._gguf))
        self._there = {PurePosixPath(file.name).name: file for file in listing.files if file.name in chosen}
        flat = (replace(file, name=name, folder=file.name.rpartition("/")[0]) for name, file in self._there.items())
        return Listing(listing.revision, tuple(flat))

    def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        return self._repository.read(self._there[file.name], start, stop)

    async def fetch(self, file: RemoteFile, path: Path, add_bytes: Callable[[int], None]) -> int | None:
        """Where the repository has a way of its own for large files."""
        if not isinstance(self._repository, WholeFiles):
            return None
        return await self._repository.fetch(self._there[file.name], path, add_bytes)


class LocalSource:
    """The files directly in one folder. Links that lead out of it are not followed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def list_files(self) -> Listing:
        """There is no revision; a file's tag is the time of its last change."""
        return Listing("", await asyncio.to_thread(self._list))

    def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        return read_file(self._folder / file.name, start, stop)

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


async def read_file(path: Path, start: int, stop: int) -> AsyncGenerator[bytes]:
    """Yield a local file's bytes from `start` up to `stop`.

    Raises:
        DownloadError: it cannot be read.
    """
    try:
        with await asyncio.to_thread(path.open, "rb") as handle:
            handle.seek(start)
            while start < stop and (chunk := await asyncio.to_thread(handle.read, min(_CHUNK, stop - start))):
                start += len(chunk)
                yield chunk
    except PermissionError as error:
        raise _unreadable(error) from error
    except OSError as error:
        raise disk_error(path, error) from error


def _unreadable(error: PermissionError) -> AccessDenied:
    return AccessDenied(f"{error.filename} may not be read by this user: change its permissions")


@asynccontextmanager
async def open_folder(folder: Path) -> AsyncIterator[LocalSource]:
    yield LocalSource(folder)
