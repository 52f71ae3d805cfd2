"""A request that another API process passes on to the first one, which is played here."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.relay import Relay, relay_path
from starlette.types import Receive, Scope, Send

LIMIT = 1 << 20


async def _no_other(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("it is to be passed on")


class FirstProcess:
    """Asks for a body, and closes as soon as it has more of it than it would take."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.has_closed = asyncio.Event()

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while self.num_bytes <= LIMIT and (size := int(await reader.readline() or b"0", 16)):
                    self.num_bytes += len(await reader.readexactly(size))
                    await reader.readline()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            self.has_closed.set()


async def _pieces() -> AsyncIterator[bytes]:
    for _ in range(24):
        yield bytes(1 << 16)


async def _ask(folder: Path, first: FirstProcess) -> httpx.Response:
    server = ServerConfig(max_body_bytes=LIMIT)
    async with await asyncio.start_unix_server(first.meet, relay_path(folder)):
        relay = Relay(_no_other, folder, Drain(1), OpenRequests(), server)
        try:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(relay), base_url="http://a") as client:
                return await client.post("/v1/responses", content=_pieces())
        finally:
            await relay.close()
            await first.has_closed.wait()


def test_a_body_that_is_too_long_is_refused_here_whenever_the_first_process_closes(tmp_path: Path) -> None:
    first = FirstProcess()
    answer = asyncio.run(_ask(tmp_path, first))
    assert answer.status_code == 413
    assert json.loads(answer.content)["error"]["code"] == "request_too_large"
    assert answer.headers["connection"] == "close"
    assert first.num_bytes <= LIMIT
