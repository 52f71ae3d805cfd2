"""Who may call which route: one table, default deny, and API keys from a file.

The decision looks at `scope["path"]` alone, which the server decoded from the request line; no header can forge it
(compare CVE-2026-48710). A route that is missing here does not exist for anybody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path

from pagefleet_protocol.engine_facts import FACTS_PATH, TEXT_PATH
from pagefleet_protocol.key_file import KeyFile, KeyFileError, read_bearer_key
from starlette.types import ASGIApp, Receive, Scope, Send

from pagefleet_engine.errors import ConfigError
from pagefleet_engine.server.errors import HttpRefusal

logger = logging.getLogger(__name__)


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
    FACTS_PATH: Access.KEY,
    TEXT_PATH: Access.KEY,
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
    """The keys of a file, which is re-read when it changes.

    Raises:
        ConfigError: at the start the file cannot be read or has no key.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._file = KeyFile(file, logger, clock)
        except KeyFileError as error:
            raise ConfigError(f"api_key_file {file} {error}") from error

    def accepts(self, key: bytes) -> bool:
        """Compare with every key, in a time that does not tell which one came close."""
        return self._file.digest_of(key) is not None


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
        key = read_bearer_key(given[0])
        if key is not None and keys.accepts(key):
            return
    message = "Give a valid API key as one header: 'Authorization: Bearer KEY'."
    raise HttpRefusal(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
