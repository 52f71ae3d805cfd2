"""Who may call what: every route of the router in one table, and whose key a request carries.

What is missing in the table is denied.
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
from pagefleet_protocol.errors import ErrorShape, shape_of
from pagefleet_protocol.key_file import KeyFile, KeyFileError, read_key
from pagefleet_protocol.tenants import Tenant

from pagefleet_router.errors import ConfigError


class Kind(Enum):
    """Who answers a route."""

    PROXY = "proxy"
    LIVEZ = "livez"
    READYZ = "readyz"
    METRICS = "metrics"
    MODELS = "models"
    MODEL = "model"
    PAGE = "page"
    STATE = "state"
    PREFLIGHT = "preflight"
    OPENAPI = "openapi"


@dataclass(frozen=True, slots=True)
class Route:
    """One route. `name` is its label in metrics and logs."""

    name: str
    kind: Kind
    methods: tuple[str, ...]
    public: bool = False
    """True: no API key is asked for."""
    generates: bool = False
    """Whether its answer is computed from a prompt."""
    stored: bool = False
    """Whether it is of a stored response, which its path names."""


_GET = ("GET", "HEAD")
ROUTES: Mapping[str, Route] = {
    route.name: route
    for route in (
        Route("/livez", Kind.LIVEZ, _GET, public=True),
        Route("/readyz", Kind.READYZ, _GET, public=True),
        Route("/health", Kind.READYZ, _GET, public=True),
        Route("/metrics", Kind.METRICS, _GET, public=True),
        Route("/v1/models", Kind.MODELS, _GET),
        Route("/v1/chat/completions", Kind.PROXY, ("POST",), generates=True),
        Route("/v1/completions", Kind.PROXY, ("POST",), generates=True),
        Route("/v1/responses", Kind.PROXY, ("POST",), generates=True),
        Route("/v1/responses/input_tokens", Kind.PROXY, ("POST",)),
        Route("/v1/messages", Kind.PROXY, ("POST",), generates=True),
        Route("/v1/messages/count_tokens", Kind.PROXY, ("POST",)),
        Route("/tokenize", Kind.PROXY, ("POST",)),
        Route("/detokenize", Kind.PROXY, ("POST",)),
        Route("/version", Kind.PROXY, ("GET",)),
        Route("/", Kind.PAGE, _GET, public=True),
        Route("/docs", Kind.PAGE, _GET, public=True),
        Route("/openapi.json", Kind.OPENAPI, _GET, public=True),
        Route(STATE_PATH, Kind.STATE, _GET),
    )
}
_FILE_PREFIX = "/console/"
_FILE_ROUTE = Route("/console/{file}", Kind.PAGE, _GET, public=True)
MODEL_PREFIX = "/v1/models/"
MODEL_ROUTE = Route("/v1/models/{model}", Kind.MODEL, _GET)
_RESPONSE = re.compile(r"/v1/responses/[A-Za-z0-9_-]{1,128}(/input_items|/cancel)?")
_RESPONSE_ROUTES = {
    None: Route("/v1/responses/{id}", Kind.PROXY, ("GET", "DELETE"), stored=True),
    "/input_items": Route("/v1/responses/{id}/input_items", Kind.PROXY, ("GET",), stored=True),
    "/cancel": Route("/v1/responses/{id}/cancel", Kind.PROXY, ("POST",), stored=True),
}


_KNOWN_TARGETS = {name.encode(): (route, shape_of(name)) for name, route in ROUTES.items()}


def known_target(target: bytes) -> tuple[Route, ErrorShape] | None:
    """Return the route of a target that is its path and no more, as nearly all are, and how errors are told there."""
    return _KNOWN_TARGETS.get(target)


def route_of(path: str) -> Route | None:
    """Return the route of a path that is compared as it came: nothing is decoded, folded or trimmed."""
    route = ROUTES.get(path)
    if route is not None:
        return route
    if path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
        return MODEL_ROUTE
    if path.startswith(_FILE_PREFIX):
        return _FILE_ROUTE
    found = _RESPONSE.fullmatch(path)
    return None if found is None else _RESPONSE_ROUTES[found[1]]


__all__ = ["ApiKeys", "Tenant"]

logger = logging.getLogger(__name__)


class ApiKeys:
    """Says whose key a request carries.

    Raises:
        ConfigError: at the start the file cannot be used or has no key.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            self._file = KeyFile(file, logger, clock)
        except KeyFileError as error:
            raise ConfigError(f"api_key_file {file} {error}") from error

    def tenant(self, authorization: Sequence[bytes], api_key: Sequence[bytes]) -> Tenant | None:
        """Return the tenant of a key, by the values of the headers that may bring one; None without a valid key."""
        key = read_key(authorization, api_key)
        return None if key is None else self._file.tenant_of(key)

    def named(self, name: str) -> Tenant | None:
        """Return a tenant with the attributes that it has now; None when it has left."""
        return self._file.tenant_named(name)
