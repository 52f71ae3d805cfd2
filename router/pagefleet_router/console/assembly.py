"""The console of one router, from its settings and its parts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from pagefleet_console.pages import read_pages
from pagefleet_protocol.cors import allow
from pagefleet_protocol.fault_book import FaultBook
from pagefleet_protocol.service_news import ServiceNews
from pagefleet_protocol.workers.siblings import CONSOLE, Siblings

from pagefleet_router.admission.gate import Gate
from pagefleet_router.config import RouterConfig
from pagefleet_router.console.board import Board, Sources
from pagefleet_router.console.service import CLUSTER_PERIOD_S, FILE_PERIOD_S, FollowedNews, ask_file, no_news
from pagefleet_router.engines.endpoints import EndpointTable
from pagefleet_router.exchange.exchange import Exchange
from pagefleet_router.exchange.own_answers import Browsers
from pagefleet_router.signals.monitor import Monitor
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.telemetry.recent_requests import RecentRequests
from pagefleet_router.wire.client_connection import ClientConnection


@dataclass(frozen=True, slots=True)
class Notes:
    """What is noted in passing: made before all that notes."""

    faults: FaultBook = field(default_factory=lambda: FaultBook(time.time))
    recent: RecentRequests = field(default_factory=RecentRequests)


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What the console looks at."""

    table: EndpointTable
    monitor: Monitor
    gate: Gate
    metrics: RouterMetrics
    connections: set[ClientConnection]
    siblings: Siblings | None
    tenants_at_gateways: Callable[[], Iterable[str]]
    """Of each request inside that a gateway carries."""


def make_board(config: RouterConfig, notes: Notes | None, parts: RouterParts) -> Board | None:
    """Return what answers `/console/state`; None: the settings want no console.

    Raises:
        ConfigError: the InferenceService is to be read in a cluster, and this is none.
    """
    if notes is None:
        return None
    siblings = parts.siblings
    return Board(
        Sources(
            table=parts.table,
            watched=parts.monitor.watched,
            gate=parts.gate,
            recent=notes.recent,
            faults=notes.faults,
            running=lambda: chain(_tenants_inside(parts.connections), parts.tenants_at_gateways()),
            flows=lambda: parts.metrics.pairs.flows,
            news=_make_news(config),
            ask_siblings=None if siblings is None else lambda: siblings.ask(CONSOLE),
        )
    )


def make_browsers(config: RouterConfig, board: Board | None) -> Browsers:
    """Return what stands between browsers and the routes."""
    return Browsers({} if board is None else read_pages(), allow(config.cors_origins), board)


def _make_news(config: RouterConfig) -> Callable[[], Awaitable[ServiceNews]]:
    if config.inference_service_file is not None:
        return FollowedNews(ask_file(config.inference_service_file), FILE_PERIOD_S, time.monotonic).news
    if config.inference_service is None:
        return no_news
    # Its HTTP client takes 0.1 s and 10 MB, which others need not pay.
    from pagefleet_router.discovery.kubernetes import make_service_asker  # noqa: PLC0415

    ask = make_service_asker(config.inference_service, config.kubernetes_namespace)
    return FollowedNews(ask, CLUSTER_PERIOD_S, time.monotonic).news


def _tenants_inside(connections: set[ClientConnection]) -> Iterator[str]:
    for connection in connections:
        responder = connection.responder
        if isinstance(responder, Exchange) and responder.is_inside:
            yield responder.view.tenant
