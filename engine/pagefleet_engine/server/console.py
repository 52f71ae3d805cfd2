"""What the browser console shows of one engine, by itself: the page's files, and `/console/state`.

Answers note what became of them in their request's scope; the board keeps the last ones. All else is read when somebody
looks, at most once a second.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pagefleet_console.pages import Page, wants_page
from pagefleet_protocol.console_state import (
    MAX_NOTES,
    ConsoleState,
    EngineState,
    FaultState,
    Phase,
    RequestState,
    ServiceState,
    decode_state,
    encode_state,
)
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.engine_history import Counters, EngineHistory
from pagefleet_protocol.fault_book import FaultBook, FaultKind, shown_time
from pagefleet_protocol.load_progress import LoadProgress
from pagefleet_protocol.openapi import openapi_document
from pagefleet_protocol.version import VERSION
from pagefleet_protocol.workers.siblings import CONSOLE
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from pagefleet_engine.server.access import keyed_asker
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.figures import EngineFigures
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.ports import Engine, ServedModel

KEPT_S = 1.0
"""A document is good for so long, whoever asks."""
_MAX_KEPT = 250
"""Requests of all tenants."""
_KEY = "pagefleet_note"
_LOG = "The log has the request's id and the reason"
FAULTS: Mapping[str, FaultKind] = {
    "internal_error": FaultKind("A request met a bug of the server.", f"{_LOG}; it is worth a report."),
    "request_failed": FaultKind("The engine gave up a request.", f"{_LOG}."),
    "out_of_memory": FaultKind(
        "A step had no memory left, and its requests ended with an error.",
        "Lower --max-num-batched-tokens, --max-num-seqs or --gpu-memory-utilization.",
    ),
    "kv_load_failed": FaultKind(
        "K/V of a prompt did not come from another engine.",
        "Look at the network between the two, and whether they have the same fleet key.",
    ),
    "queue_full": FaultKind(
        "Requests were turned away: too many wait already.",
        "Add engines, or let more wait by --max-num-queued-reqs.",
    ),
    "engine_dead": FaultKind("The engine's core ended, and the process with it.", "The log says why."),
}
"""By the code of the error that the client got."""
NOT_A_NUMBER = FaultKind(
    "Requests ended because the model's output was not a number.",
    "Use another --dtype or other weights: these numbers do not fit the type.",
)


class RequestNote:
    """What becomes of one request, as those that answer it come to know."""

    __slots__ = ("error", "first_token_s", "generated_tokens", "is_generation", "prompt_tokens")

    def __init__(self) -> None:
        self.is_generation = False
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.first_token_s: float | None = None
        """From its arrival."""
        self.error: str | None = None
        """Code of the error that it ended with."""

    def count(self, num_tokens: int, seconds: float) -> None:
        """Note that tokens were generated, so many seconds after its arrival."""
        if self.first_token_s is None:
            self.first_token_s = seconds
        self.generated_tokens += num_tokens


def begin_note(scope: Scope) -> RequestNote:
    """Give a request its note."""
    note = scope[_KEY] = RequestNote()
    return note


def note_of(scope: Scope) -> RequestNote | None:
    """Return the note of a request; None where nobody will look."""
    note: RequestNote | None = scope.get(_KEY)
    return note


@dataclass(frozen=True, slots=True)
class _Passed:
    state: RequestState
    tenant: str


@dataclass(frozen=True, slots=True)
class Shown:
    """What the board looks at."""

    engine: Engine
    model: ServedModel
    facts: EngineFacts
    drain: Drain
    figures: EngineFigures


class EngineBoard:
    """Remembers the last requests and faults, and puts the document together.

    Args:
        shown: what it looks at.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
    """

    def __init__(
        self, shown: Shown, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._shown = shown
        self._clock = clock
        self._wall_clock = wall_clock
        self._name = socket.gethostname()
        if shown.figures.siblings is not None:
            shown.figures.siblings.answer(CONSOLE, self.own_part)
        self._faults = FaultBook(wall_clock)
        self._passed: deque[_Passed] = deque(maxlen=_MAX_KEPT)
        self._history = EngineHistory()
        self._counters: Counters | None = None
        self._built_at: float | None = None
        self._looking = asyncio.Lock()
        self._elsewhere: list[ConsoleState] = []
        """What other processes of the engine noted."""
        self._documents: dict[str | None, tuple[str, bytes]] = {}

    def passed(self, scope: Scope, request_id: str, route: str, status: int, seconds: float) -> None:
        """Note that a request is over."""
        note = note_of(scope)
        if note is None:
            return
        kind = FAULTS.get(note.error or "")
        if kind is not None:
            self._faults.note(kind)
        if not note.is_generation:
            return
        asker = keyed_asker(scope)
        tenant = "" if asker is None else asker.tenant
        state = RequestState(
            id=request_id,
            at=shown_time(self._wall_clock() - seconds),
            tenant=tenant,
            route=route,
            model=self._shown.model.name,
            status=status,
            error=note.error,
            seconds=round(seconds, 5),
            queue_seconds=0.0,
            ttft_seconds=None if note.first_token_s is None else round(note.first_token_s, 5),
            prompt_tokens=note.prompt_tokens or None,
            cached_tokens=0,
            generated_tokens=note.generated_tokens,
            engine=self._name,
            prefill_engine=None,
            attempts=1,
            tried=(),
            trace_id=None,
        )
        self._passed.append(_Passed(state, tenant))

    async def state(self, request: Request) -> Response:
        """Answer `/console/state` for whoever asks."""
        asker = keyed_asker(request.scope)
        etag, body = await self._document(None if asker is None else asker.tenant)
        headers = {"etag": etag, "cache-control": "private, no-cache"}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type="application/json")

    def own_part(self) -> bytes:
        """Return what this process noted, for the others."""
        return encode_state(self._state(None))[1]

    async def _document(self, tenant: str | None) -> tuple[str, bytes]:
        async with self._looking:
            now = self._clock()
            if self._built_at is None or now - self._built_at >= KEPT_S:
                await self._look(now)
                self._built_at = now
                self._documents = {}
        found = self._documents.get(tenant)
        if found is None:
            found = self._documents[tenant] = encode_state(self._state(tenant, self._elsewhere))
        return found

    async def _look(self, now: float) -> None:
        shown = self._shown
        if (siblings := shown.figures.siblings) is not None:
            self._elsewhere = [decode_state(part) for part in await siblings.ask(CONSOLE)]
        counters, before = self._history.note(await shown.figures.text(), now), self._counters
        if counters is not None:
            self._counters = counters
            if before is not None and counters.nan_requests > before.nan_requests:
                self._faults.note(NOT_A_NUMBER, count=int(counters.nan_requests - before.nan_requests))

    def _state(self, tenant: str | None, elsewhere: Sequence[ConsoleState] = ()) -> ConsoleState:
        faults = _newest(self._faults.states(), [other.faults for other in elsewhere])
        own = tuple(one.state for one in reversed(self._passed) if tenant in (None, one.tenant))
        theirs = [[one for one in other.requests if tenant in (None, one.tenant)] for other in elsewhere]
        return ConsoleState(
            at=shown_time(self._wall_clock()),
            source="engine",
            tenant=tenant,
            workers=1 + len(elsewhere),
            service=ServiceState(name=None, namespace=None, models=self._shown.model.names, version=VERSION),
            engines=(self._engine(len(faults)),),
            faults=faults,
            requests=_newest(own, theirs),
        )

    def _engine(self, num_faults: int) -> EngineState:
        shown, recent = self._shown, self._history.recent()
        stats, facts = shown.engine.stats, shown.facts
        phase, reason = self._phase()
        return EngineState(
            name=self._name,
            url="",
            model=shown.model.name,
            role="both" if facts.kv_transfer is None else facts.kv_transfer.role,
            revision=facts.revision,
            phase=phase,
            reason=reason,
            load=None,
            running=None if stats is None else stats.requests_running,
            waiting=None if stats is None else stats.requests_waiting,
            max_running=facts.max_num_seqs,
            prompt_tokens_s=recent.prompt_tokens_s,
            generated_tokens_s=recent.generated_tokens_s,
            kv_usage=None if stats is None else round(stats.kv_usage, 4),
            prefix_hit_ratio=recent.prefix_hit_ratio,
            ttft=recent.ttft,
            faults=num_faults,
        )

    def _phase(self) -> tuple[Phase, str | None]:
        health = self._shown.engine.health()
        if self._shown.drain.draining:
            return "draining", "it was told to stop"
        if health.ready:
            return "ready", None
        return (
            "unreachable",
            f"its core made no step for {health.stalled_s:.0f} s" if health.alive else "its core ended",
        )


_Noted = TypeVar("_Noted", FaultState, RequestState)


def _newest(own: tuple[_Noted, ...], others: Iterable[Sequence[_Noted]]) -> tuple[_Noted, ...]:
    found = list(own)
    for other in others:
        found += other
    found.sort(key=lambda one: one.at, reverse=True)
    return tuple(found[:MAX_NOTES])


def loading_state(model: str, progress: LoadProgress) -> ConsoleState:
    """Return what is known of an engine that loads a model: no figure yet, and no name that clients may use."""
    engine = EngineState(
        name=socket.gethostname(),
        url="",
        model=model,
        role="both",
        revision=None,
        phase="starting" if progress.phase == "starting" else "loading",
        reason=progress.describe(),
        load=progress.share,
        running=None,
        waiting=None,
        max_running=None,
        prompt_tokens_s=None,
        generated_tokens_s=None,
        kv_usage=None,
        prefix_hit_ratio=None,
        ttft=None,
        faults=0,
    )
    return ConsoleState(
        at=shown_time(time.time()),
        source="engine",
        tenant=None,
        workers=1,
        service=ServiceState(name=None, namespace=None, models=(), version=VERSION),
        engines=(engine,),
    )


class PageRoutes:
    """Serves the page's files. They hold no data."""

    def __init__(self, pages: Mapping[str, Page]) -> None:
        self._pages = pages
        self._openapi: bytes | None = None

    async def file(self, request: Request) -> Response:
        """Return a file; at `/` only to a browser that opens it.

        Raises:
            HttpRefusal: there is none.
        """
        path: str = request.scope["path"]
        page = self._pages.get(path)
        if page is None or (path == "/" and not wants_page(request.headers.get("accept"))):
            raise HttpRefusal(404, "There is no such route.", code="unknown_url")
        found = page.answer(request.headers.get("accept-encoding"), request.headers.get("if-none-match"))
        return Response(found.body, found.status, dict(found.headers))

    async def openapi(self, request: Request) -> Response:
        """Return the description of the API, which is made when somebody asks for it."""
        if self._openapi is None:
            self._openapi = await asyncio.to_thread(openapi_document)
        return Response(self._openapi, media_type="application/json")


def note_error(scope: Scope, code: str | None, status: int) -> None:
    """Note in a request's scope the error that it ends with."""
    note = note_of(scope)
    if note is not None:
        note.error = code or str(status)
