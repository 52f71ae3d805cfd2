"""What one API process alone can answer, whoever is asked: the first one's, to which the others pass such requests on.

These are the responses that can be asked for again, some of which run without a client, and what is recorded of the
engine. The first process has the store, and counts these requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import aiohttp
from pagefleet_protocol import headers
from pagefleet_protocol.engine_facts import TEXT_PATH
from pagefleet_protocol.errors import shape_of
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from pagefleet_engine.config import ServerConfig
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.server.body import too_large
from pagefleet_engine.server.errors import HttpRefusal, answer_of
from pagefleet_engine.server.interruption import ClientGoneError, OpenRequests
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.middleware import new_id, send_error

_RELAYED = ("/v1/responses", "/start_profile", "/stop_profile", TEXT_PATH)
_NOT_PASSED = frozenset(
    {"connection", "content-length", "expect", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
_ADDED_HERE = _NOT_PASSED - {"content-length"} | {"date", headers.INCARNATION.lower(), headers.MODEL.lower()}


def relay_path(folder: Path) -> Path:
    """Return where the first process answers the others, in their private folder."""
    return folder / "first.sock"


class Relay:
    """ASGI: passes some requests on to the first process, and all others to this one's application.

    Args:
        app: of this process.
        folder: private to the API processes.
        drain: waits for requests that were passed on.
        open_requests: ends them with this process.
        server: its settings.
    """

    def __init__(
        self, app: ASGIApp, folder: Path, drain: Drain, open_requests: OpenRequests, server: ServerConfig
    ) -> None:
        self._app = app
        self._drain = drain
        self._open = open_requests
        self._max_body_bytes = server.max_body_bytes
        self._first = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(relay_path(folder)), limit=0),
            timeout=aiohttp.ClientTimeout(None),
            auto_decompress=False,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._first.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or have it answered."""
        if scope["type"] != "http" or not _is_relayed(scope["path"]):
            await self._app(scope, receive, send)
            return
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        body = _Body(receive, self._max_body_bytes, scope["headers"])
        with self._drain.passing_on():
            try:
                async with self._open.scope(body.receive_after):
                    await self._pass_on(scope, body, send_noted)
            except ClientGoneError:
                return
            except Exception as error:
                if body.is_broken_off:
                    return
                if started:
                    raise  # the connection closes, so that nobody takes it for a whole answer
                lost = isinstance(error, aiohttp.ClientError | OSError)
                reason = body.refusal or (EngineDead("The engine stopped unexpectedly.") if lost else error)
                await send_error(answer_of(reason, new_id("req")), send, shape_of(scope["path"]))

    async def _pass_on(self, scope: Scope, body: _Body, send: Send) -> None:
        query = scope["query_string"].decode("latin-1")
        target = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        asked = self._first.request(
            scope["method"],
            URL(f"http://first{target}", encoded=True),
            headers=_passed(_texts(scope["headers"]), _NOT_PASSED),
            data=body.pieces() if body.is_there else None,
            expect100=body.is_there,
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            allow_redirects=False,
        )
        async with asked as answer:
            head = [
                (name.lower().encode("latin-1"), value.encode("latin-1"))
                for name, value in _passed(answer.headers.items(), _ADDED_HERE)
            ]
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class _Body:
    """A request's body, which is read when the first process asks for it: by then it has looked at key and limits."""

    def __init__(self, receive: Receive, limit: int, head: Iterable[tuple[bytes, bytes]]) -> None:
        self.is_there = any(name in (b"content-length", b"transfer-encoding") for name, _ in head)
        self.is_broken_off = False
        """Whether the client left in its middle."""
        self.refusal: HttpRefusal | None = None
        """Of one that is too long. The first process's would be lost where it closes before all of the body is sent."""
        self._receive = receive
        self._limit = limit
        self._is_read = asyncio.Event()
        if not self.is_there:
            self._is_read.set()

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, unless it is refused."""
        num_bytes, is_more = 0, True
        while is_more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.is_broken_off = True
                raise ClientGoneError
            num_bytes += len(piece := message.get("body", b""))
            if num_bytes > self._limit:
                self.refusal = too_large(self._limit)
                raise self.refusal
            is_more = message.get("more_body", False)
            if piece:
                yield piece
        self._is_read.set()

    async def receive_after(self) -> Message:
        """What comes after the body."""
        await self._is_read.wait()
        return await self._receive()


def _is_relayed(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in _RELAYED)


def _texts(fields: Iterable[tuple[bytes, bytes]]) -> Iterable[tuple[str, str]]:
    return ((name.decode("latin-1"), value.decode("latin-1")) for name, value in fields)


def _passed(fields: Iterable[tuple[str, str]], but: frozenset[str]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in fields if name.lower() not in but]
