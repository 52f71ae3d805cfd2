"""API keys from a file: one a line, `#` comments, each with what its tenant may do. Only hashes of keys stay in memory.

The file is looked at again while requests come, so that keys are rotated without a restart: write the new key beside
the old one, change the clients, take the old one out. A Secret mounted by Kubernetes is such a file. A key that is not
in the file lets nobody in, so a file without any shuts everybody out; replace it as a whole (write beside it, rename).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote_plus

from pagefleet_protocol.tenants import KeyLineError, Tenant, read_key_line

RECHECK_S = 1.0
"""Between two looks at the file."""


class KeyFileError(ValueError):
    """The file cannot be read, a line is wrong, or there is no key at the start.

    The message is the end of a sentence about the file, and holds no key.
    """


class KeyFile:
    """The keys of one file.

    A file that vanishes, cannot be read or has a wrong line says nothing about keys: the last ones stay in force, and
    the log says so once. One that is readable and has no key any more says that all are withdrawn.

    Raises:
        KeyFileError: at the start there is no key to be had.
    """

    def __init__(self, path: Path, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._logger = logger
        self._clock = clock
        self._complaint = ""
        self._stamp = _stamp(path)
        self._tenants = _read_tenants(path)
        if not self._tenants:
            raise KeyFileError("has no key: write one a line")
        self._by_name = {tenant.name: tenant for tenant in self._tenants.values()}
        self._checked_at = clock()

    def tenant_of(self, key: bytes) -> Tenant | None:
        """Return whose a key is, after comparing it with all, in a time that does not tell which one came close."""
        self._reload_if_changed()
        return _tenant_of(key, self._tenants)

    @property
    def num_tenants(self) -> int:
        """Tenants that the file names."""
        return len(self._by_name)

    def tenant_named(self, name: str) -> Tenant | None:
        """Return a tenant as the file has it now; None when it has left."""
        return self._by_name.get(name)

    def _reload_if_changed(self) -> None:
        now = self._clock()
        if now - self._checked_at < RECHECK_S:
            return
        self._checked_at = now
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp and not self._complaint:
                return
            tenants = _read_tenants(self._path)
        except KeyFileError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                self._logger.warning("api_key_file %s; the last keys stay in force", error)
            return
        self._complaint, self._stamp = "", stamp
        if tenants == self._tenants:
            return
        self._tenants = tenants
        self._by_name = {tenant.name: tenant for tenant in tenants.values()}
        if tenants:
            self._logger.info("api_key_file changed: %d keys", len(tenants))
        else:
            self._logger.warning("api_key_file has no key any more: nobody is let in until one is written")


class KeyList:
    """Keys that never change, each of a tenant of its own.

    Raises:
        KeyFileError: there is none, or one is no key.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        if not keys or not all(key.isprintable() and key and " " not in key for key in keys):
            raise KeyFileError("has no key, or one with spaces or control characters: give words")
        self._tenants = {hashlib.sha256(key.encode()).digest(): read_key_line(key)[1] for key in keys}

    def tenant_of(self, key: bytes) -> Tenant | None:
        """Return whose a key is, as `KeyFile.tenant_of` does."""
        return _tenant_of(key, self._tenants)

    @property
    def num_tenants(self) -> int:
        """One for each key."""
        return len(self._tenants)


API_KEY = "x-api-key"
"""Header of a bare key, as Anthropic's clients send it."""
KEY_WANTED = "Give a valid API key as one header: 'Authorization: Bearer KEY' or 'x-api-key: KEY'."


def read_key(authorization: Sequence[bytes], api_key: Sequence[bytes]) -> bytes | None:
    """Return the key that a request brings in one of two headers, or in both; None where they say no one key.

    Args:
        authorization: the values of `Authorization`.
        api_key: those of `x-api-key`.
    """
    if len(authorization) > 1 or len(api_key) > 1:
        return None
    given = {read_bearer_key(value) for value in authorization} | set(api_key)
    return given.pop() if len(given) == 1 else None


KEY_IN_URL = (
    "A key does not belong into a URL, which logs, proxies and browsers keep: "
    "send it as a header, 'Authorization: Bearer KEY' or 'x-api-key: KEY', and replace this one, which may be known."
)
_QUERY_NAMES = frozenset({"key", "api_key", "apikey", "api-key", "token", "access_token"})


def has_key_in_query(query: str) -> bool:
    """Whether a URL's query (what follows the `?`) has a parameter that is meant for a key, whatever its value."""
    return any(unquote_plus(part.partition("=")[0]).lower() in _QUERY_NAMES for part in re.split("[&;]", query))


def read_bearer_key(authorization: bytes) -> bytes | None:
    """Return the key in the value of an `Authorization` header; None when it is not of the form `Bearer KEY`."""
    scheme, _, key = authorization.partition(b" ")
    return key.strip(b" ") if scheme.lower() == b"bearer" else None


def _tenant_of(key: bytes, tenants: Mapping[bytes, Tenant]) -> Tenant | None:
    digest = hashlib.sha256(key).digest()
    found = None
    for known, tenant in tenants.items():
        if hmac.compare_digest(known, digest):
            found = tenant
    return found


def _read_tenants(path: Path) -> dict[bytes, Tenant]:
    """Return the tenant of every key's SHA-256."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(_unreadable(error)) from error
    tenants: dict[bytes, Tenant] = {}
    by_name: dict[str, Tenant] = {}
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith("#"):
            continue
        try:
            key, tenant = read_key_line(line)
        except KeyLineError as error:
            raise KeyFileError(f"cannot be used (line {number}: {error})") from None
        digest = hashlib.sha256(key).digest()
        if by_name.setdefault(tenant.name, tenant) != tenant or tenants.setdefault(digest, tenant) != tenant:
            reason = f"tenant {tenant.name} has other attributes, or this key another tenant, on a line above"
            raise KeyFileError(f"cannot be used (line {number}: {reason})")
    return tenants


def _stamp(path: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(path)  # follows the links of a mounted Secret, which swap as a whole
    except OSError as error:
        raise KeyFileError(_unreadable(error)) from error
    return status.st_ino, status.st_mtime_ns, status.st_size


def _unreadable(error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
    return f"cannot be read ({reason}): give a readable file"
