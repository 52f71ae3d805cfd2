"""Every route of the router in one table: what it takes, who may call it, who answers. What is missing is denied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Who answers a route."""

    PROXY = "proxy"
    LIVEZ = "livez"
    READYZ = "readyz"
    METRICS = "metrics"
    MODELS = "models"
    MODEL = "model"


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
        Route("/tokenize", Kind.PROXY, ("POST",)),
        Route("/detokenize", Kind.PROXY, ("POST",)),
        Route("/version", Kind.PROXY, ("GET",)),
    )
}
MODEL_PREFIX = "/v1/models/"
MODEL_ROUTE = Route("/v1/models/{model}", Kind.MODEL, _GET)


def route_of(path: str) -> Route | None:
    """Return the route of a path that is compared as it came: nothing is decoded, folded or trimmed."""
    route = ROUTES.get(path)
    if route is None and path.startswith(MODEL_PREFIX) and len(path) > len(MODEL_PREFIX):
        return MODEL_ROUTE
    return route
