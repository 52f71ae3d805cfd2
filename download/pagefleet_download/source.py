"""What every store looks like from here: a listing, and bytes of one file from an offset on."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

Algorithm = Literal["sha256", "git-sha1", "md5"]


class Hasher(Protocol):
    """As `hashlib` has them."""

    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file's bytes must come to."""

    algorithm: Algorithm
    hexdigest: str

    def hasher(self, size: int) -> Hasher:
        """Make one that comes to `hexdigest` for the right bytes, of a file of `size` bytes."""
        match self.algorithm:
            case "sha256":
                return hashlib.sha256()
            case "md5":
                return hashlib.md5(usedforsecurity=False)
            case "git-sha1":
                # The name of a git blob: SHA-1 over this header and the content.
                return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a model."""

    name: str
    size: int
    tag: str
    """Changes when the content does; empty where the store has no such thing."""
    digest: Digest | None = None
    """None where the store gives none: then only the size is compared."""
    folder: str = ""
    """Where it lies in its repository, if not at the top; models have no folders."""


@dataclass(frozen=True, slots=True)
class Listing:
    """All files of a model at one revision."""

    revision: str
    """What the asked revision is now, in a form that never moves; empty where there is nothing like it."""
    files: tuple[RemoteFile, ...]


def digest_of_listing(files: Iterable[RemoteFile]) -> str:
    """Return what stands for a revision where a store has none: a digest of all names, sizes and tags."""
    listed = sorted(f"{file.name}\0{file.size}\0{file.tag}\n" for file in files)
    return hashlib.sha256("".join(listed).encode()).hexdigest()[:40]


class ModelSource(Protocol):
    """One model in one store."""

    async def list_files(self) -> Listing:
        """Everything there is, wanted or not.

        Raises:
            DownloadError: there is no such model, or it may not be read.
            Interrupted: the store failed; ask again.
        """
        ...

    def read(self, file: RemoteFile, start: int, stop: int) -> AsyncGenerator[bytes]:
        """Yield the bytes from `start` up to `stop`, at most; `0 <= start < stop <= file.size`. Pieces may be empty.

        Raises:
            DownloadError: the file is gone, has changed, or may not be read.
            Interrupted: the store failed; ask for the rest again.
        """
        ...


@runtime_checkable
class WholeFiles(Protocol):
    """What a source may have besides: a way of its own for large files."""

    async def fetch(self, file: RemoteFile, path: Path, add_bytes: Callable[[int], None]) -> int | None:
        """Bring a whole file to `path`, where nothing is. Returns the bytes that `add_bytes` was told.

        None: not in this way, `read` it.
        """
        ...
