"""What a server answers and tells while its model is downloaded and its engine loads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from pagefleet_console.pages import read_pages, wants_page
from pagefleet_download.progress import ProgressMeter
from pagefleet_protocol import headers
from pagefleet_protocol.console_state import STATE_PATH, encode_state
from pagefleet_protocol.errors import Fault, shape_of
from pagefleet_protocol.load_progress import LOADING, LoadPhase, LoadProgress, encode_loading
from pagefleet_protocol.settings.log import can_erase
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from pagefleet_engine.client.data_ranks import furthest_behind
from pagefleet_engine.server.access import AccessGate, ApiKeys
from pagefleet_engine.server.console import PageRoutes, loading_state
from pagefleet_engine.server.middleware import ErrorSeam, HeadCheck

logger = logging.getLogger(__name__)

READINESS = ("/readyz", "/health")
_JSON = "application/json"
_OF_DOWNLOAD: dict[str, LoadPhase] = {"downloading": "download", "verifying": "verification"}
"""Of its phases those that are told."""


class Loading:
    """How far a server is on its way to the first answer: whoever works says where that can be read."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._source: Callable[[], Sequence[LoadProgress]] | None = None
        self.download = ProgressMeter()
        """Of the model, where it is downloaded."""

    def follow(self, source: Callable[[], Sequence[LoadProgress]]) -> None:
        """Let `source` tell from now on, of each rank; it returns without waiting."""
        self._source = source

    def progress(self) -> LoadProgress:
        """Return how far it is, without waiting: as far as the rank that is furthest behind."""
        return furthest_behind(self.ranks())

    def ranks(self) -> Sequence[LoadProgress]:
        """Return how far each rank is, or the download that they wait for, without waiting."""
        return [self._downloaded()] if self._source is None else self._source()

    def _downloaded(self) -> LoadProgress:
        seen, seconds = self.download.snapshot(), time.monotonic() - self._began
        phase = _OF_DOWNLOAD.get(seen.phase)
        if phase is None:
            return LoadProgress(seconds=seconds)
        done = min(seen.bytes_done, seen.bytes_total)
        speed = self.download.bytes_per_second() if phase == "download" else 0.0
        return LoadProgress(phase, done, seen.bytes_total, seconds, speed)


class LoadingApp:
    """ASGI: `/livez` is fine, `/readyz` tells how far the loading is, everything else has to come again later.

    Args:
        progress: returns without waiting. It needs no key, and nothing here says more without one.
        page: the console for a browser; None: there is none.
    """

    def __init__(self, progress: Callable[[], LoadProgress], page: ASGIApp | None = None) -> None:
        self._progress = progress
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer at once; the connection closes, so that nobody sends more to an engine that cannot take it."""
        if self._page is not None and _is_of_page(scope):
            await self._page(scope, receive, send)
            return
        status, path = 503, scope["path"]
        if path == "/livez":
            status, body = 200, b'{"status":"live"}'
        elif path in READINESS:
            body = encode_loading(self._progress())
        else:
            body = Fault(503, "The engine is not ready yet: try again soon.", code=LOADING).body(shape_of(path))
        head = {"content-type": _JSON, "content-length": str(len(body)), "connection": "close"}
        if status != 200:
            head[headers.RETRY_AFTER.lower()] = "1"
        fields = [(name.encode(), value.encode()) for name, value in head.items()]
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})


def _is_of_page(scope: Scope) -> bool:
    if scope["path"] != "/":
        return str(scope["path"]).startswith("/console/")
    return wants_page(Headers(scope=scope).get("accept"))


def loading_page(model: str, progress: Callable[[], LoadProgress], keys: ApiKeys | None) -> ASGIApp:
    """Return the console's page and the state of an engine that loads `model`, under the rules of the whole server."""
    files = PageRoutes(read_pages())

    async def state(request: Request) -> Response:
        etag, body = encode_state(loading_state(model, progress()))
        return Response(body, headers={"etag": etag, "cache-control": "private, no-cache"}, media_type=_JSON)

    gates = [Middleware(ErrorSeam), Middleware(HeadCheck), Middleware(AccessGate, keys=keys)]
    routes = [Route("/", files.file), Route(STATE_PATH, state), Route("/console/{file}", files.file)]
    return Starlette(routes=routes, middleware=gates)


_BAR_PERIOD_S = 0.1
_LINE_PERIOD_S = 0.25
_WORTH_A_LINE_S = 0.5
"""A phase that is over sooner has none."""
_REMINDER_S = 10.0
"""Between two lines of one phase."""
_UNTOLD: tuple[LoadPhase, ...] = ("starting", "other", "imports")
_ERASE = "\r\x1b[K"


async def tell_loading(progress: Callable[[], Sequence[LoadProgress]], terminal: Terminal | None) -> None:
    """Tell until cancelled how far each rank's loading is: as bars in a terminal, else as lines of the log."""
    if terminal is None:
        lines: defaultdict[str, LoadingLines] = defaultdict(LoadingLines)
        while True:
            for name, at in _named(progress()):
                if (line := lines[name].next_line(at)) is not None:
                    logger.info("%s%s", name, line)
            await asyncio.sleep(_LINE_PERIOD_S)
    rows = 1
    try:
        while True:
            width, blocks = terminal.width(), terminal.blocks
            bars = [f"{name}{bar(at, width - len(name), blocks)}" for name, at in _named(progress())]
            rows = len(bars)
            terminal.write(f"{_over(bars)}\r")
            await asyncio.sleep(_BAR_PERIOD_S)
    finally:
        terminal.write(_over([""] * rows))


@contextlib.asynccontextmanager
async def telling(loading: Loading) -> AsyncIterator[None]:
    """Tell while the block runs how far the loading is."""
    told = asyncio.create_task(tell_loading(loading.ranks, Terminal.of(sys.stderr, os.environ)))
    try:
        yield
    finally:
        told.cancel()
        await asyncio.wait({told})


def _named(ranks: Sequence[LoadProgress]) -> Iterable[tuple[str, LoadProgress]]:
    return [(f"rank {rank}: " if len(ranks) > 1 else "", at) for rank, at in enumerate(ranks)]


def _over(rows: Sequence[str]) -> str:
    """Return what writes rows, the cursor being in the first of them again: a line of the log is written over that."""
    up = f"\x1b[{len(rows) - 1}A" if len(rows) > 1 else ""
    return "\n".join(_ERASE + row for row in rows) + up


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where a person looks."""

    stream: TextIO

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str]) -> Terminal | None:
        """Return the terminal behind a stream; None where there is none that can erase a line."""
        return cls(stream) if can_erase(stream, environment) else None

    def width(self) -> int:
        """Columns now."""
        return shutil.get_terminal_size().columns

    @property
    def blocks(self) -> tuple[str, str]:
        """What a bar is drawn with: full, empty."""
        return ("█", "░") if (self.stream.encoding or "").lower().startswith("utf") else ("#", "-")

    def write(self, text: str) -> None:
        """Write now; a terminal that is gone is nobody's loss."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
            self.stream.flush()


def bar(progress: LoadProgress, width: int, blocks: tuple[str, str]) -> str:
    """Return the loading in one line of at most `width` - 1 characters."""
    told = f"{progress.describe()}, {progress.seconds:.0f} s"
    room = min(30, width - 2 - len(told))
    if progress.share is None or room < 5:
        return told[: max(0, width - 1)]
    full = round(room * progress.share)
    return f"{blocks[0] * full}{blocks[1] * (room - full)} {told}"


class LoadingLines:
    """Which lines of a log tell the loading: one for a phase that takes a while, then one now and then."""

    def __init__(self) -> None:
        self._phase: LoadPhase = "starting"
        self._tell_at = 0.0

    def next_line(self, progress: LoadProgress) -> str | None:
        """Return what is to be told now."""
        if progress.phase != self._phase:
            self._phase, self._tell_at = progress.phase, progress.seconds + _WORTH_A_LINE_S
        if progress.phase in _UNTOLD or progress.seconds < self._tell_at:
            return None
        self._tell_at = progress.seconds + _REMINDER_S
        return f"loading: {progress.describe()}"
