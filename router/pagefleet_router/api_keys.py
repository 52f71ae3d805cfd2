"""API keys from a file: one a line, `#` comments; re-read when the file changes. Only hashes stay in memory."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from pagefleet_router.errors import ConfigError

logger = logging.getLogger(__name__)

_RECHECK_S = 1.0


class ApiKeys:
    """Says whose key a request carries.

    A file that vanishes leaves the last keys in force; an emptied one lets nobody in.

    Raises:
        ConfigError: at the start the file cannot be read or has no key.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        try:
            self._stamp = _stamp(file)
            self._hashes = _read_hashes(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {file} cannot be read ({_reason(error)}): give a readable file") from error
        if not self._hashes:
            raise ConfigError(f"api_key_file {file} has no key: write one a line")
        self._checked_at = clock()

    def tenant(self, authorization: bytes) -> bytes | None:
        """Return the tenant, a hash, of an `Authorization` header's value; None when it holds no valid key.

        The time it takes does not tell which key came close.
        """
        self._reload_if_changed()
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip(b" ")).digest()
        found = False
        for known in self._hashes:
            found |= hmac.compare_digest(known, digest)
        return digest if found and scheme.lower() == b"bearer" else None

    def _reload_if_changed(self) -> None:
        now = self._clock()
        if now - self._checked_at < _RECHECK_S:
            return
        self._checked_at = now
        try:
            stamp = _stamp(self._file)
            if stamp == self._stamp:
                return
            self._hashes = _read_hashes(self._file)
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("api_key_file cannot be read (%s); the last keys stay in force", _reason(error))
            return
        self._stamp = stamp
        logger.info("api_key_file changed: %d keys", len(self._hashes))


def _read_hashes(file: Path) -> tuple[bytes, ...]:
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(hashlib.sha256(line.encode()).digest() for line in lines if line and not line.startswith("#"))


def _stamp(file: Path) -> tuple[int, int, int]:
    status = os.stat(file)  # follows the links of a mounted Secret, which swap as a whole
    return status.st_ino, status.st_mtime_ns, status.st_size


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
