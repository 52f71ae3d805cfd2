"""What the router answers itself: to browsers, with pages and CORS, and in a task where it has to ask others first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from pagefleet_console.pages import Page, wants_page
from pagefleet_protocol.cors import REFUSED, Cors, is_preflight
from pagefleet_protocol.key_file import KEY_IN_URL, has_key_in_query

from pagefleet_router.errors import Refusal
from pagefleet_router.wire.access import Kind, Route
from pagefleet_router.wire.client_connection import ClientConnection, OwnAnswer
from pagefleet_router.wire.client_request import ClientRequest

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
_ROOT = "/"


class Console(Protocol):
    """Knows what the console shows."""

    async def state(self, request: ClientRequest) -> OwnAnswer:
        """Answer `/console/state` for whoever asks."""


class Browsers:
    """What stands between browsers and the routes.

    Args:
        pages: the console's files by path; empty: there is no console.
        cors: whose pages may call; None: those of this server alone.
        console: None: there is none.
    """

    def __init__(self, pages: Mapping[str, Page], cors: Cors | None, console: Console | None) -> None:
        self.console = console
        self._pages = pages
        self._cors = cors
        self._openapi: bytes | None = None

    def look_at(self, request: ClientRequest) -> None:
        """Note what the answer, whatever it is, has to tell the browser.

        Raises:
            Refusal: there is a key in the URL (400).
        """
        if self._cors is not None:
            told = self._cors.headers(_text(request, b"origin"))
            request.cors = [(name.encode(), value.encode("latin-1")) for name, value in told]
        query = request.target.partition(b"?")[2]
        if query and has_key_in_query(query.decode("latin-1")):
            raise Refusal(400, KEY_IN_URL, code="key_in_url")

    def route(self, request: ClientRequest, route: Route | None) -> Route | None:
        """Return the route of a request, now that it is known who serves browsers what.

        Raises:
            Refusal: a page asks that may not call (403).
        """
        if route is None:
            return None
        if self._cors is not None and is_preflight(request.method, request.fields):
            if not self._cors.allows(_text(request, b"origin") or ""):
                raise Refusal(403, REFUSED, code="origin_not_allowed")
            return Route("preflight", Kind.PREFLIGHT, (*route.methods, "OPTIONS"), public=True)
        if route.kind is Kind.PAGE and not self._has_page(request):
            return None
        return None if route.kind in (Kind.STATE, Kind.OPENAPI) and self.console is None else route

    async def look(self, kind: Kind, request: ClientRequest) -> OwnAnswer:
        """Return what the console shows, or the description of the API, which is made when somebody asks for it."""
        assert self.console is not None
        if kind is Kind.STATE:
            return await self.console.state(request)
        if self._openapi is None:
            from pagefleet_protocol.openapi import openapi_document  # noqa: PLC0415 - hardly any router is asked

            self._openapi = await asyncio.to_thread(openapi_document)
        return OwnAnswer(self._openapi, ((b"content-type", b"application/json"),))

    def answer(self, kind: Kind, request: ClientRequest) -> OwnAnswer:
        """Return a file, or the answer to a page that asks before it calls."""
        return self._page(request) if kind is Kind.PAGE else self._preflight(request)

    def _page(self, request: ClientRequest) -> OwnAnswer:
        page = self._pages[_path(request)]
        found = page.answer(_text(request, b"accept-encoding"), _text(request, b"if-none-match"))
        fields = [(name.encode(), value.encode()) for name, value in found.headers.items()]
        return OwnAnswer(found.body, fields, found.status)

    def _preflight(self, request: ClientRequest) -> OwnAnswer:
        assert self._cors is not None
        assert request.route is not None
        methods = request.route.methods[:-1]
        told = self._cors.preflight(_text(request, b"access-control-request-headers"), methods)
        return OwnAnswer(b"", [(name.encode(), value.encode("latin-1")) for name, value in told], 204)

    def _has_page(self, request: ClientRequest) -> bool:
        path = _path(request)
        return path in self._pages and (path != _ROOT or wants_page(_text(request, b"accept")))


def _path(request: ClientRequest) -> str:
    return request.target.partition(b"?")[0].decode("latin-1")


def _text(request: ClientRequest, name: bytes) -> str | None:
    value = request.fields.get(name)
    return None if value is None else value.decode("latin-1")


class Later:
    """Implements the responder of a client connection, for an answer that takes a moment.

    Args:
        request: what is answered.
        client: who gets it.
        ask: returns the answer, in bounded time.
    """

    def __init__(
        self, request: ClientRequest, client: ClientConnection, ask: Callable[[], Awaitable[OwnAnswer]]
    ) -> None:  # fmt: skip
        self.request = request
        self.status = 200
        self._client = client
        self._ask = ask
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.get_running_loop().create_task(self._answer())

    def client_lost(self) -> None:
        """Ask no more."""
        self.status = CLIENT_LEFT
        self._stop()

    def client_paused(self) -> None:
        """Nothing is sent before all of it is there."""

    def client_resumed(self) -> None:
        """See `client_paused`."""

    def check(self, now: float) -> None:
        """Nothing to look at: asking ends by itself."""

    def cut(self, refusal: Refusal) -> None:
        """End now."""
        self.status = refusal.status
        self._stop()
        self._client.refuse(refusal)

    async def _answer(self) -> None:
        try:
            answer = await self._ask()
        except Exception:
            logger.exception("a question about this router cannot be answered")
            self._task = None
            self.cut(Refusal(500, "The answer cannot be put together; the router's log says why.", code="internal"))
            return
        self._task = None
        self.status = answer.status
        self._client.answer(answer)

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
