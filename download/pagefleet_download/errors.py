"""Why a model cannot be downloaded. Each class is one reason of `pagefleet_protocol.model_facts`.

DownloadError
├── ModelNotFound      the store has no such repository, revision, bucket or folder
├── AccessDenied       the store wants credentials, or others
├── StoreUnreachable   the store does not answer, or stopped answering, for longer than one run waits
├── ChecksumMismatch   what arrived is not what the store has
├── DiskFull           the files do not fit
├── BadModel           the files are no model that pagefleet runs
└── BadSettings        the command or the target folder cannot be used as given

Interrupted is for inside, with EndedEarly below it: one attempt failed in a way that the next may not.
"""

from __future__ import annotations

import errno
from pathlib import Path

from pagefleet_protocol.model_facts import Reason

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_VOLUME_FAILS = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN})


class DownloadError(Exception):
    """Root of the tree; the message says what to do."""

    reason: Reason


class ModelNotFound(DownloadError):
    """The store has no such model."""

    reason: Reason = "ModelNotFound"


class AccessDenied(DownloadError):
    """The store does not let these credentials, or nobody without any, read the model."""

    reason: Reason = "AccessDenied"


class StoreUnreachable(DownloadError):
    """The store failed for longer than one run waits."""

    reason: Reason = "StoreUnreachable"


class ChecksumMismatch(DownloadError):
    """A file is not what the store says it is, twice."""

    reason: Reason = "ChecksumMismatch"


class DiskFull(DownloadError):
    """The files do not fit into the folder's volume."""

    reason: Reason = "DiskFull"


class BadModel(DownloadError):
    """The files are no model that pagefleet runs."""

    reason: Reason = "BadModel"


class BadSettings(DownloadError):
    """The command line, the environment or the target folder cannot be used."""

    reason: Reason = "BadSettings"


class Interrupted(Exception):
    """One attempt to read from a store failed; another may succeed, after `retry_after` seconds if that is given."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class EndedEarly(Interrupted):
    """A file ended before the size that its store lists, and nothing was cut on the way."""


def said(error: Exception) -> str:
    """What a library says, in one line: what follows the first is for its makers."""
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def disk_error(path: Path, error: OSError) -> DownloadError:
    """What a failed write or read at `path` means."""
    said = error.strerror or str(error) or type(error).__name__
    if error.errno in _NO_SPACE:
        return DiskFull(f"{path}: {said}: give the volume more space")
    if error.errno in _VOLUME_FAILS:
        return StoreUnreachable(f"{path}: {said}: the volume fails; look at its storage")
    return BadSettings(f"{path}: {said}: give a folder that this user can write")
