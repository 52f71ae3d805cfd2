"""Folders for the sockets between processes of one program; those of programs that were killed are swept."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_LOCK = "owner.lock"
_MAX_BASE_BYTES = 70
"""The kernel takes 107 bytes for a socket's path; the rest is for the names below."""
_IN_MEMORY = "/dev/shm"  # noqa: S108 - the folder below it is private
_YOUNG_S = 60.0
"""So long a folder may be without a lock because it is just being made."""


class PrivateFolder:
    """A new folder of mode 0700; whoever made it, or a fork of it, holds its lock while it lives.

    A disk that is full does not keep a program from starting: then the folder is in memory.

    Args:
        prefix: of its name. Folders with the same prefix whose owner is gone are removed.

    Raises:
        OSError: no folder can be made anywhere.
    """

    def __init__(self, prefix: str) -> None:
        problem: OSError | None = None
        bases = tuple(dict.fromkeys(_bases()))
        for base in bases:
            _sweep(base, prefix)
        for base in bases:
            try:
                self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            except OSError as error:
                problem = problem or error
                continue
            try:
                self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                os.write(self._lock, b"\0" * 4096)  # a full disk may have names left, and no room for what they hold
                fcntl.flock(self._lock, fcntl.LOCK_EX)
                return
            except OSError as error:
                problem = problem or error
                shutil.rmtree(self.path, ignore_errors=True)
        assert problem is not None
        raise problem

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove it. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _bases() -> Iterator[str]:
    """Where folders may be made, the best first; a path that is too long is none."""
    with contextlib.suppress(FileNotFoundError):  # no file can be written in any of the usual places
        if len(os.fsencode(tempfile.gettempdir())) <= _MAX_BASE_BYTES:
            yield tempfile.gettempdir()
    yield from ("/tmp", _IN_MEMORY)  # noqa: S108 - the folder below it is private


def _sweep(base: str, prefix: str) -> None:
    """Remove what killed programs of this user left."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                _remove_if_left(Path(entry.path))


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError):
        found = folder.lstat()
        if found.st_uid != os.geteuid() or time.time() - found.st_mtime < _YOUNG_S:
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
