"""One model under several names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.server.app import create_app

from tests.engine.server.conftest import MODEL, make_parts
from tests.fakes.scripted_engine import ScriptedEngine

ALIASES = ("gpt-4o", "org/model:8b")
NAMES = (MODEL, *ALIASES)


def with_app(ask: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            parts = make_parts(ScriptedEngine(), pool)
            app = create_app(replace(parts, model=replace(parts.model, aliases=ALIASES)), ServerConfig())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
                await ask(http)

    asyncio.run(run())


def test_every_name_is_listed_and_found() -> None:
    async def ask(http: httpx.AsyncClient) -> None:
        cards = (await http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == list(NAMES)
        for name in NAMES:
            card = (await http.get(f"/v1/models/{name}")).json()
            assert card == {**cards[0], "id": name}
        assert (await http.get("/v1/models/gpt-4")).status_code == 404

    with_app(ask)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_an_answer_carries_the_name_that_was_asked_for(path: str, prompt: dict[str, object], name: str) -> None:
    async def ask(http: httpx.AsyncClient) -> None:
        body = {"model": name, "max_tokens": 3, **prompt}
        assert (await http.post(path, json=body)).json()["model"] == name
        lines = (await http.post(path, json={**body, "stream": True})).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
        assert len(chunks) >= 3
        assert {chunk["model"] for chunk in chunks} == {name}

    with_app(ask)


def test_tokenize_takes_every_name() -> None:
    async def ask(http: httpx.AsyncClient) -> None:
        for name in NAMES:
            assert (await http.post("/tokenize", json={"model": name, "prompt": "Hi"})).json()["count"] == 2
        assert (await http.post("/tokenize", json={"model": "other", "prompt": "Hi"})).status_code == 404

    with_app(ask)
