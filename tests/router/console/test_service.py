"""How a router comes to know its InferenceService: from a file, or from the API server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import uvloop
from aiohttp import web
from pagefleet_protocol.console_state import STATE_PATH, decode_state
from pagefleet_protocol.service_news import NO_NEWS
from pagefleet_router.config import RouterConfig
from pagefleet_router.console.service import FollowedNews, ask_file
from pagefleet_router.discovery.slice_api import ApiAccess, ApiServerError, read_inference_service
from pagefleet_router.errors import ConfigError

from tests.fakes.faulty_engine import fleet, whole

SERVICE = (
    '{"metadata":{"name":"chat","namespace":"prod"},"status":{"conditions":[{"type":"Ready","status":"True",'
    '"reason":"Serving","message":"all is well"}],"scaling":{"mode":"Internal","current":1,"desired":%d,'
    '"reason":"Demand","signal":"9 wait","at":"2026-01-01T00:00:0%dZ"}}}'
)


def test_the_console_has_what_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "chat.service.json"
    file.write_text(SERVICE % (2, 1))

    async def scenario() -> None:
        async with fleet(tmp_path, whole(), inference_service_file=file) as f:
            state = decode_state((await f.get(STATE_PATH)).body)
        assert (state.service.name, state.service.namespace) == ("chat", "prod")
        assert [(one.type, one.message) for one in state.service.statements] == [("Ready", "all is well")]
        (scaling,) = state.scaling
        assert (scaling.role, scaling.current, scaling.decisions[0].wanted) == ("engine", 1, 2)

    uvloop.run(scenario())


def test_decisions_are_remembered_and_what_cannot_be_read_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, now = tmp_path / "chat.service.json", [0.0]

    async def scenario() -> None:
        news = FollowedNews(ask_file(file), 1.0, lambda: now[0])
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert await news.news() == NO_NEWS
                now[0] += 1.0
        assert len(caplog.records) == 1
        assert "cannot be read" in caplog.text
        for desired in (2, 3):
            file.write_text(SERVICE % (desired, desired))
            now[0] += 1.0
            found = await news.news()
        assert [one.wanted for one in found.scaling[0].decisions] == [3, 2]
        file.write_text("[")
        assert await news.news() == found, "it was asked a moment ago"
        now[0] += 1.0
        assert await news.news() == found, "the last word stays"

    asyncio.run(scenario())


def test_the_api_server_is_asked_for_that_one_object(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(f"{request.path} {request.headers['authorization']}")
        return web.Response(body=(SERVICE % (2, 1)).encode(), status=403 if "other" in request.path else 200)

    async def scenario() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address: Any = runner.addresses[0]
        access = ApiAccess(f"http://127.0.0.1:{address[1]}", token, None)
        try:
            assert b'"chat"' in await read_inference_service(access, "prod", "chat")
            with pytest.raises(ApiServerError, match="may not get inferenceservices; give it a Role"):
                await read_inference_service(access, "prod", "other")
        finally:
            await runner.cleanup()

    asyncio.run(scenario())
    assert seen[0] == "/apis/pagefleet.dev/v1alpha1/namespaces/prod/inferenceservices/chat Bearer secret"


def test_a_service_of_a_cluster_needs_one() -> None:
    with pytest.raises(ConfigError, match="--inference-service is read from a cluster"):
        RouterConfig(engine=("http://a:1",), model_name="m", inference_service="chat")
    with pytest.raises(ConfigError, match="give a Kubernetes name"):
        RouterConfig(kubernetes_service="chat", model_name="m", inference_service="../secrets")
