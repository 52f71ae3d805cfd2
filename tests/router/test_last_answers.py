"""Clients that ask on open connections while the router leaves: answered once more, and told to go elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import uvloop
from pagefleet_router import app

from tests.fakes.faulty_engine import chat, fleet, post, whole


def test_a_request_on_an_open_connection_is_answered_for_the_last_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_LAST_ANSWERS_S", 600.0)

    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f, asyncio.timeout(60):
            client, probe = await f.connect(), await f.connect()
            await client.send(post(chat()))
            first = await client.answer()
            assert (first.status, first.headers.get("connection")) == (200, None)
            leaving = asyncio.ensure_future(f.router.drain())
            await f.until(lambda: f.router.front.leaving)
            await client.send(post(chat()))
            last = await client.answer()
            assert (last.status, last.headers["connection"]) == (200, "close")
            await probe.send(b"GET /readyz HTTP/1.1\r\nhost: r\r\n\r\n")
            assert (await probe.answer()).status == 503
            await leaving  # at once, as no connection is left

    uvloop.run(scenario())
