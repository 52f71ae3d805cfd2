"""Who may call which route: one table, default deny, and API keys from a file.

The decision looks at `scope["path"]` alone, which the server decoded from the request line; no header can forge it
(compare CVE-2026-48710). A route that is missing here does not exist for anybody.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.server.errors import HttpRefusal

logger = logging.getLogger(__name__)

_RECHECK_S = 1.0


class Access(Enum):
    """What a route asks of its caller."""

    PUBLIC = "public"
    KEY = "key"


ROUTES: Mapping[str, Access] = {
    "/livez": Access.PUBLIC,
    "/readyz": Access.PUBLIC,
    "/health": Access.PUBLIC,
    "/metrics": Access.PUBLIC,
    "/version": Access.KEY,
    "/tokenize": Access.KEY,
    "/detokenize": Access.KEY,
    "/v1/models": Access.KEY,
    "/v1/models/{model:path}": Access.KEY,
    "/v1/completions": Access.KEY,
    "/v1/chat/completions": Access.KEY,
}
"""Every route, as its pattern."""

_MODEL_PREFIX, _MODEL_ROUTE = "/v1/models/", "/v1/models/{model:path}"


def route_of(path: str) -> str | None:
    """Return the pattern of the table that a path belongs to."""
    if path in ROUTES:
        return path
    return _MODEL_ROUTE if path.startswith(_MODEL_PREFIX) else None


class ApiKeys:
    """The keys of a file, one a line, `#` comments; re-read when the file changes.

    Only hashes stay in memory. A file that vanishes leaves the last keys in force; an emptied one lets nobody in.

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

    def accepts(self, key: bytes) -> bool:
        """Compare with every key, in a time that does not tell which one came close."""
        self._reload_if_changed()
        digest = hashlib.sha256(key).digest()
        found = False
        for known in self._hashes:
            found |= hmac.compare_digest(known, digest)
        return found

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


class AccessGate:
    """ASGI middleware that applies the table.

    Args:
        app: what is behind the gate.
        keys: None asks for no key; the table still holds.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http":
            route = route_of(scope["path"])
            access = Access.KEY if route is None else ROUTES[route]
            if access is Access.KEY and self._keys is not None:
                _check_key(scope, self._keys)
            if route is None:
                raise HttpRefusal(404, "There is no such route.", code="unknown_url")
        await self._app(scope, receive, send)


def _check_key(scope: Scope, keys: ApiKeys) -> None:
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(given) == 1:
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() == b"bearer" and keys.accepts(key.strip(b" ")):
            return
    message = "Give a valid API key as one header: 'Authorization: Bearer KEY'."
    raise HttpRefusal(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _read_hashes(file: Path) -> tuple[bytes, ...]:
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return tuple(hashlib.sha256(line.encode()).digest() for line in lines if line and not line.startswith("#"))


def _stamp(file: Path) -> tuple[int, int, int]:
    status = os.stat(file)  # follows the links of a mounted Secret, which swap as a whole
    return status.st_ino, status.st_mtime_ns, status.st_size


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or type(error).__name__
