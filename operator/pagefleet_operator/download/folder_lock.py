"""One process at a time works in a folder; the others wait, and then find everything done."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from pagefleet_operator.download.errors import BadSettings
from pagefleet_operator.download.settings import DownloadSettings

_log = logging.getLogger(__name__)
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS})


@asynccontextmanager
async def locked(path: Path, settings: DownloadSettings) -> AsyncIterator[None]:
    """Hold an exclusive lock on a file, which stays. The system gives it back when a process dies.

    Raises:
        BadSettings: the folder's file system has no locks.
        OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        waited = False
        while not _try_lock(descriptor, path):
            if not waited:
                _log.info("another process works in %s: waiting until it is done", path.parent)
            waited = True
            await settings.host.sleep(settings.patience.lock_poll)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _NO_LOCKS:
            raise BadSettings(
                f"the file system of {path.parent} has no file locks ({error.strerror}): use a volume that has them"
            ) from error
        raise
    return True
