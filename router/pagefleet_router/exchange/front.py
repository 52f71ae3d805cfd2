"""The front door: checks heads, answers the router's own routes, and starts an exchange for every other."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

import msgspec
from pagefleet_protocol import headers
from pagefleet_protocol.errors import shape_of
from pagefleet_protocol.headers import REQUEST_ID
from pagefleet_protocol.key_file import API_KEY, KEY_WANTED

from pagefleet_router.engines.endpoints import EndpointTable
from pagefleet_router.errors import Refusal, no_engine, no_list, overloaded, shutting_down
from pagefleet_router.exchange.exchange import Exchange
from pagefleet_router.exchange.own_answers import Browsers, Later
from pagefleet_router.exchange.services import Services
from pagefleet_router.exchange.view import model_not_found, read_asker, unknown_store, view_request, view_stored
from pagefleet_router.request_view import ANONYMOUS, RequestView
from pagefleet_router.telemetry.access_log import AccessLog
from pagefleet_router.telemetry.access_record import AccessRecord
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.telemetry.recent_requests import PassedRequest, RecentRequests
from pagefleet_router.wire.access import MODEL_PREFIX, ApiKeys, Kind, Route, known_target, route_of
from pagefleet_router.wire.client_connection import ClientConnection, OwnAnswer, Responder
from pagefleet_router.wire.client_request import ClientRequest
from pagefleet_router.wire.http_names import PATH
from pagefleet_router.wire.http_names import REQUEST_ID as HARMLESS_ID

_JSON = ((b"content-type", b"application/json"),)
_PROMETHEUS = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)
_QUERY = re.compile(rb"[A-Za-z0-9._~%=&,\[\]-]{0,1024}")
_REQUEST_ID = REQUEST_ID.encode()
_API_KEY = API_KEY.encode()
_LATER = (Kind.STATE, Kind.OPENAPI)
_UNKNOWN = Route("unknown", Kind.PROXY, ())


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """What the front door allows, and where it looks."""

    max_concurrent: int
    holds: bool = False
    """Whether requests wait for a model's first engine: then this router is ready before any engine is."""
    session_header: bytes = headers.SESSION.encode()


@dataclass(frozen=True, slots=True)
class Visitors:
    """What is known of who comes."""

    browsers: Browsers
    keys: ApiKeys | None = None
    """None: no key is asked for."""


@dataclass(frozen=True, slots=True)
class Notebooks:
    """Where requests that are over are noted."""

    log: AccessLog | None = None
    recent: RecentRequests | None = None


class FrontDoor:
    """Implements the front of every client connection."""

    def __init__(
        self, table: EndpointTable, services: Services, metrics: RouterMetrics, limits: FrontLimits,
        visitors: Visitors, notebooks: Notebooks,
    ) -> None:  # fmt: skip
        self.leaving = False
        """Each answer is the last one on its connection."""
        self.draining = False
        """Nothing new is taken."""
        self._table = table
        self._services = services
        self._metrics = metrics
        self._limits = limits
        self._keys = visitors.keys
        self._browsers = visitors.browsers
        self._log = notebooks.log
        self._recent = notebooks.recent
        self._id_prefix = f"req-{secrets.token_hex(8)}-".encode()
        self._ids = itertools.count(1)

    def on_head(self, request: ClientRequest) -> None:
        """Give the request its id, find its route, check its key."""
        request.request_id = self._request_id(request)
        try:
            self._admit(request)
        except Refusal as refusal:
            request.refusal = refusal

    def on_request(self, request: ClientRequest, client: ClientConnection) -> None:
        """Answer, or begin an exchange."""
        route = request.route
        assert route is not None
        try:
            if route.kind is Kind.PROXY:
                exchange = Exchange(request, self.view(request), client, self._services)
                client.begin(exchange)
                exchange.start()
            elif self._is_gathered(route):
                later = Later(request, client, lambda: self._gathered(request))
                client.begin(later)
                later.start()
            else:
                answer = self._own(route.kind, request)
                client.answer(answer)
                self._note(request, answer.status, None)
        except Refusal as refusal:
            self.on_refused(request, refusal)
            client.refuse(refusal)

    def on_refused(self, request: ClientRequest, refusal: Refusal) -> None:
        """Count a request that did not pass its head's checks."""
        self._note(request, refusal.status, None, refusal.code)

    def on_finished(self, responder: Responder) -> None:
        """Count and log an exchange's end."""
        if isinstance(responder, Later):
            self._note(responder.request, responder.status, None)
            return
        assert isinstance(responder, Exchange)
        self._services.traces.end(responder.span, responder.delivery.status, responder)
        self._note(responder.request, responder.delivery.status, responder)
        responder.attempt = None  # which has it too: a cycle would stay until garbage is collected

    def _request_id(self, request: ClientRequest) -> bytes:
        given = request.values(_REQUEST_ID)
        if len(given) == 1 and HARMLESS_ID.fullmatch(given[0]):
            return given[0]
        return self._id_prefix + str(next(self._ids)).encode()

    def _admit(self, request: ClientRequest) -> None:
        self._browsers.look_at(request)
        known = known_target(request.target)
        if known is None:
            self._read_target(request)
        else:
            request.route, request.shape = known
        if request.method != "POST":
            request.route = self._browsers.route(request, request.route)
        route = request.route
        if self._keys is not None and (route is None or not route.public):
            request.tenant = self._keys.tenant(request.values(b"authorization"), request.values(_API_KEY))
            if request.tenant is None:
                raise Refusal(401, KEY_WANTED, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        if route is None:
            raise Refusal(404, "There is no such route.", code="unknown_url")
        if request.method not in route.methods:
            allow = {"allow": ", ".join(route.methods)}
            raise Refusal(405, "This route does not take this method.", code="method_not_allowed", headers=allow)
        if route.stored and not _QUERY.fullmatch(request.target.partition(b"?")[2]):
            raise Refusal(400, "The request's query is not valid.", code="invalid_http")
        if self.leaving:
            request.keep_alive = False
        if self.draining and not route.public:
            raise shutting_down()

    def _read_target(self, request: ClientRequest) -> None:
        path = request.target.decode("latin-1").partition("?")[0]
        if not PATH.fullmatch(path):
            request.keep_alive = False
            raise Refusal(400, "The request target is not a valid path.", code="invalid_http")
        request.route = route_of(path)
        request.shape = shape_of(path)

    def view(self, request: ClientRequest) -> RequestView:
        """Return what admission and the choice of an engine depend on, and count the request as one for its model.

        Raises:
            Refusal: the request is wrong, or there are too many.
        """
        services = self._services
        if services.dispatcher.budget.live_requests >= self._limits.max_concurrent:
            raise overloaded()
        assert request.route is not None
        asker = read_asker(request, self._limits.session_header)
        if request.route.stored:
            view = view_stored(request, asker)
        elif request.method == "POST":
            with_pieces = services.dispatcher.policy.uses_prefixes
            view = view_request(request.body, self._table.snapshot, asker, with_pieces, request.route.generates)
            if view.model is not None:
                self._metrics.arrivals[view.model] += 1
        else:
            view = RequestView(None)
        refusal = unknown_store(view, self._table.snapshot, request.route.stored)
        if refusal is not None:
            raise refusal
        return view

    async def own(self, request: ClientRequest) -> OwnAnswer:
        """Return the answer to a request whose route no engine answers.

        Raises:
            Refusal: there is none now.
        """
        route = request.route
        assert route is not None
        if self._is_gathered(route):
            return await self._gathered(request)
        return self._own(route.kind, request)

    def on_picked(self, request: ClientRequest, passed: PassedRequest) -> None:
        """Count and log the end of a request that a gateway carried."""
        route, record = request.route or _UNKNOWN, passed.record
        self._metrics.finished(route.name, record.status, record.total_ms / 1000)
        if self._log is not None:
            self._log.write(record)
        if self._recent is not None and self._is_kept(request, route, record.status, self._services.dispatcher.clock()):
            self._recent.add(passed)

    def _is_gathered(self, route: Route) -> bool:
        """Whether others are asked before it is answered."""
        return route.kind in _LATER or (route.kind is Kind.METRICS and self._metrics.gather is not None)

    async def _gathered(self, request: ClientRequest) -> OwnAnswer:
        """Return what other processes of this router have a word in."""
        assert request.route is not None
        if request.route.kind in _LATER:
            return await self._browsers.look(request.route.kind, request)
        assert self._metrics.gather is not None
        return OwnAnswer(await self._metrics.gather(), _PROMETHEUS)

    def _own(self, kind: Kind, request: ClientRequest) -> OwnAnswer:
        if kind is Kind.PAGE or kind is Kind.PREFLIGHT:
            return self._browsers.answer(kind, request)
        if kind is Kind.METRICS:
            return OwnAnswer(self._metrics.text(), _PROMETHEUS)
        if kind is Kind.READYZ:
            return OwnAnswer(self._readiness(), _JSON)
        if kind is Kind.MODELS:
            models = [_model_card(name) for name in self._table.snapshot.names]
            return OwnAnswer(msgspec.json.encode({"object": "list", "data": models}), _JSON)
        return OwnAnswer(self._model(request) if kind is Kind.MODEL else b'{"status":"alive"}', _JSON)

    def _model(self, request: ClientRequest) -> bytes:
        path = request.target.partition(b"?")[0]
        name = unquote_to_bytes(path[len(MODEL_PREFIX) :]).decode("utf-8", "replace")
        if self._table.snapshot.model_of(name) is None:
            raise model_not_found(name)
        return msgspec.json.encode(_model_card(name))

    def unready(self) -> Refusal | None:
        """Return why this router should be sent no requests; None where it should."""
        if self.leaving:
            return shutting_down()
        if self._num_ready or (self._limits.holds and self._table.unlisted is None):
            return None
        return no_engine() if self._table.unlisted is None else no_list(self._table.unlisted)

    @property
    def _num_ready(self) -> int:
        return sum(map(len, self._table.snapshot.usable.values()))

    def _readiness(self) -> bytes:
        refusal = self.unready()
        if refusal is not None:
            raise refusal
        return msgspec.json.encode({"status": "ready", "engines": self._num_ready})

    def _note(self, request: ClientRequest, status: int, exchange: Exchange | None, code: str | None = None) -> None:
        now = self._services.dispatcher.clock()
        seconds, route = now - request.began_at, request.route or _UNKNOWN
        self._metrics.finished(route.name, status, seconds)
        is_kept = self._is_kept(request, route, status, now)
        if self._log is None and not is_kept:
            return
        request_id, total_ms = request.request_id.decode(), milliseconds(seconds)
        if exchange is None:
            record = AccessRecord(request_id, route.name, status, total_ms)
        else:
            record = _record(request_id, route.name, total_ms, exchange)
        if self._log is not None:
            self._log.write(record)
        if is_kept:
            assert self._recent is not None
            self._recent.add(_passed(record, request, exchange, code))

    def _is_kept(self, request: ClientRequest, route: Route, status: int, now: float) -> bool:
        """Whether the console wants it."""
        return (
            self._recent is not None
            and route.kind is Kind.PROXY
            and not self._is_strange(request, route)
            and self._recent.wants(status, now)
        )

    def _is_strange(self, request: ClientRequest, route: Route) -> bool:
        """Whether nobody knows whose request it is, or what for: it is in no tenant's list."""
        return route is _UNKNOWN or (self._keys is not None and request.tenant is None)


def milliseconds(seconds: float) -> float:
    """Return a time of the log, to a hundredth: `round` takes as long as all else that a line does."""
    return int(seconds * 1e5 + 0.5) / 100


def _record(request_id: str, route: str, total_ms: float, exchange: Exchange) -> AccessRecord:
    delivery, view, choice, attempt = exchange.delivery, exchange.view, exchange.choice, exchange.attempt
    first_s, pair = (None, None) if attempt is None else (attempt.first_byte_s, attempt.pair)
    return AccessRecord(
        request_id,
        route,
        delivery.status,
        total_ms,
        engine=None if choice is None else choice.engine.id,
        retries=exchange.num_retries,
        first_byte_ms=None if first_s is None else milliseconds(first_s),
        bytes_out=delivery.num_bytes,
        model=view.model,
        prompt_tokens=view.num_tokens,
        cached_tokens=0 if choice is None else choice.cached_tokens,
        queue_ms=milliseconds(exchange.waited_s),
        pd="none" if choice is None else choice.kind,
        transfer_id=None if pair is None else pair.transfer.id,
        prefill_engine=None if pair is None else pair.prefill.engine.id,
    )


def _passed(
    record: AccessRecord, request: ClientRequest, exchange: Exchange | None, code: str | None
) -> PassedRequest:  # fmt: skip
    tenant = ANONYMOUS if request.tenant is None else request.tenant.name
    if exchange is None:
        return PassedRequest(record, time.time(), tenant, code)
    delivery = exchange.delivery
    first_at = delivery.first_read_at
    context = exchange.span.context or ()
    return PassedRequest(
        record,
        time.time(),
        tenant,
        exchange.error,
        ttft_s=first_at - request.began_at if first_at is not None and delivery.is_stream else None,
        generated_tokens=delivery.num_tokens if delivery.is_stream else None,
        tried=tuple(exchange.tried),
        trace_parent=next((value for name, value in context if name == b"traceparent"), b""),
    )


def _model_card(name: str) -> Mapping[str, object]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "pagefleet"}
