"""Who may call which route: one table, default deny, and API keys from a file.

The decision looks at `scope["path"]` alone, which the server decoded from the request line; no header can forge it
(compare CVE-2026-48710). A route that is missing here does not exist for anybody.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pagefleet_protocol.console_state import STATE_PATH
from pagefleet_protocol.engine_facts import FACTS_PATH, TEXT_PATH
from pagefleet_protocol.handoff import tenant_salt
from pagefleet_protocol.key_file import API_KEY, KEY_WANTED, KeyFile, KeyFileError, KeyList, read_key
from pagefleet_protocol.openapi import OPENAPI_PATH
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
    "/": Access.PUBLIC,
    "/docs": Access.PUBLIC,
    OPENAPI_PATH: Access.PUBLIC,
    "/console/{file}": Access.PUBLIC,
    STATE_PATH: Access.KEY,
    "/version": Access.KEY,
    FACTS_PATH: Access.KEY,
    TEXT_PATH: Access.KEY,
    "/tokenize": Access.KEY,
    "/detokenize": Access.KEY,
    "/start_profile": Access.KEY,
    "/stop_profile": Access.KEY,
    "/v1/models": Access.KEY,
    "/v1/models/{model:path}": Access.KEY,
    "/v1/completions": Access.KEY,
    "/v1/chat/completions": Access.KEY,
    "/v1/responses": Access.KEY,
    "/v1/responses/input_tokens": Access.KEY,
    "/v1/responses/{id}": Access.KEY,
    "/v1/responses/{id}/input_items": Access.KEY,
    "/v1/responses/{id}/cancel": Access.KEY,
    "/v1/messages": Access.KEY,
    "/v1/messages/count_tokens": Access.KEY,
}
"""Every route, as its pattern."""

_ASKER = "pagefleet_asker"
_API_KEY = API_KEY.encode()
_RESPONSE = re.compile(r"/v1/responses/[^/]+(/input_items|/cancel)?")
_FILE_PREFIX, _FILE_ROUTE = "/console/", "/console/{file}"
_MODEL_PREFIX, _MODEL_ROUTE = "/v1/models/", "/v1/models/{model:path}"


def route_of(path: str) -> str | None:
    """Return the pattern of the table that a path belongs to."""
    if path in ROUTES:
        return path
    if path.startswith(_MODEL_PREFIX):
        return _MODEL_ROUTE
    if path.startswith(_FILE_PREFIX):
        return _FILE_ROUTE
    found = _RESPONSE.fullmatch(path)
    return None if found is None else f"/v1/responses/{{id}}{found[1] or ''}"


@dataclass(frozen=True, slots=True)
class Asker:
    """What the engine must know of who asks. Without keys of its own it believes a router's headers."""

    salt: str | None = None
    """Of the tenant's cached prefixes, and the name of its line; None: shared by all who have none."""
    max_priority: int | None = None
    """Highest that the tenant's requests may ask for, larger being more urgent; None: any."""
    tenant: str = ""
    """Its name in the file of keys."""
    owner: str = ""
    """Of stored responses: the tenant, by whatever name it has here. Empty: nobody in particular."""


NOBODY = Asker()


def is_counted(path: str) -> bool:
    """Whether a request is work: probes, metrics and the console are answered however much there is, to the end."""
    route = route_of(path)
    return route is None or (ROUTES[route] is Access.KEY and route != STATE_PATH)


def keyed_asker(scope: Scope) -> Asker | None:
    """Return who asks by the key of a request; None where no keys are asked for."""
    asker: Asker | None = scope.get(_ASKER)
    return asker


class ApiKeys:
    """The keys of a file, which is re-read when it changes, or keys that were given as they are.

    Raises:
        ConfigError: at the start the file cannot be read or has no key, or what was given is no key.
    """

    def __init__(self, keys: Path | Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        called = f"api_key_file {keys}" if isinstance(keys, Path) else "api_key"
        try:
            self._keys = KeyFile(keys, logger, clock) if isinstance(keys, Path) else KeyList(keys)
        except KeyFileError as error:
            raise ConfigError(f"{called} {error}") from error

    def asker_of(self, key: bytes) -> Asker | None:
        """Return who asks with a key; None for one that the file has not.

        Compares with every key, in a time that does not tell which one came close.
        """
        tenant = self._keys.tenant_of(key)
        if tenant is None:
            return None
        owner = tenant_salt(tenant.name)
        return Asker(owner if self._keys.num_tenants > 1 else None, tenant.max_priority, tenant.name, owner)


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
                scope[_ASKER] = _asker(scope, self._keys)
            if route is None:
                raise HttpRefusal(404, "There is no such route.", code="unknown_url")
        await self._app(scope, receive, send)


def _asker(scope: Scope, keys: ApiKeys) -> Asker:
    bearer, bare = ([value for key, value in scope["headers"] if key == name] for name in (b"authorization", _API_KEY))
    key = read_key(bearer, bare)
    asker = None if key is None else keys.asker_of(key)
    if asker is None:
        raise HttpRefusal(401, KEY_WANTED, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
    return asker
