"""The console of one engine: its page, what it tells of itself, and who may call from a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pagefleet_engine.config import ServerConfig
from pagefleet_engine.errors import ConfigError, RequestFailed
from pagefleet_engine.server import console
from pagefleet_protocol.console_state import STATE_PATH, ConsoleState, decode_state

from tests.engine.server.conftest import MODEL, LiveServer

BROWSER = {"accept": "text/html,application/xhtml+xml"}
ORIGIN = "https://chat.example.com"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}


@pytest.fixture(autouse=True)
def always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "KEPT_S", 0.0)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    server = LiveServer(ServerConfig(cors_origins=(ORIGIN,)))
    yield server
    server.stop()


def state_of(server: LiveServer, **headers: str) -> ConsoleState:
    answer = httpx.get(server.url + STATE_PATH, headers=headers)
    assert answer.status_code == 200, answer.text
    return decode_state(answer.content)


def test_an_engine_tells_of_itself(live: LiveServer) -> None:
    assert httpx.post(live.url + "/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine"}).status_code == 200
    state = state_of(live)
    assert (state.source, state.workers, state.tenant, state.service.models) == ("engine", 1, None, (MODEL,))
    assert (state.pairs, state.admission, state.scaling) == ((), (), ())
    (engine,) = state.engines
    assert (engine.phase, engine.model, engine.role, engine.reason) == ("ready", MODEL, "both", None)
    assert engine.max_running == 8
    request = next(one for one in state.requests if one.id == "mine")
    assert (request.status, request.error, request.route) == (200, None, "/v1/chat/completions")
    assert request.generated_tokens == 3
    assert request.prompt_tokens is not None
    assert request.ttft_seconds is not None
    assert 0 < request.ttft_seconds <= request.seconds


def test_probes_and_refused_bodies_are_no_requests_of_note(live: LiveServer) -> None:
    before = len(state_of(live).requests)
    assert httpx.get(live.url + "/readyz").status_code == 200
    assert httpx.post(live.url + "/v1/chat/completions", json=CHAT | {"n": 0}).status_code == 400
    state = state_of(live)
    assert len(state.requests) == before
    assert state.faults == ()


def test_nothing_new_is_not_sent_again(live: LiveServer) -> None:
    first = httpx.get(live.url + STATE_PATH)
    again = httpx.get(live.url + STATE_PATH, headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert json.loads(first.content)["at"]


def test_a_failed_request_is_a_fault_with_a_remedy() -> None:
    server = LiveServer(ServerConfig())
    try:
        server.engine.fail_after = 1, RequestFailed("it broke")
        assert httpx.post(server.url + "/v1/chat/completions", json=CHAT).status_code == 500
        state = state_of(server)
    finally:
        server.stop()
    (fault,) = state.faults
    assert (fault.what, fault.count) == ("The engine gave up a request.", 1)
    assert state.engines[0].faults == 1
    assert [request.error for request in state.requests] == ["request_failed"]


def test_tenants_see_their_own_requests_and_nobody_anything_without_a_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red\ntwo tenant=blue\n")
    server = LiveServer(ServerConfig(api_key_file=str(keys)))
    try:
        assert httpx.get(server.url + STATE_PATH).status_code == 401
        red = {"authorization": "Bearer one"}
        assert httpx.post(server.url + "/v1/chat/completions", json=CHAT, headers=red).status_code == 200
        assert [request.tenant for request in state_of(server, **red).requests] == ["red"]
        assert state_of(server, **{"x-api-key": "two"}).requests == ()
        page = httpx.get(server.url + "/", headers=BROWSER)
        assert page.status_code == 200, "the page holds no data"
    finally:
        server.stop()


def test_a_browser_gets_the_page_and_a_program_what_it_got_before(live: LiveServer) -> None:
    page = httpx.get(live.url + "/", headers=BROWSER)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.headers["content-encoding"] == "gzip"
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
    assert httpx.get(live.url + "/", headers=BROWSER | {"if-none-match": page.headers["etag"]}).status_code == 304
    for path in ("/", "/console/no.js", "/console/"):
        answer = httpx.get(live.url + path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url"), path


def test_the_page_learns_what_a_message_may_hold(live: LiveServer) -> None:
    (card,) = httpx.get(live.url + "/v1/models").json()["data"]
    assert card["input_modalities"] == ["text"]


def test_the_api_is_described(live: LiveServer) -> None:
    described = httpx.get(live.url + "/openapi.json").json()
    assert "/v1/chat/completions" in described["paths"]
    page = httpx.get(live.url + "/docs")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")


def test_no_console_means_none() -> None:
    server = LiveServer(ServerConfig(console=False))
    try:
        for path in ("/", "/docs", "/openapi.json", STATE_PATH, "/console/app.js"):
            assert httpx.get(server.url + path, headers=BROWSER).status_code == 404, path
    finally:
        server.stop()


def test_a_key_in_a_url_is_refused(live: LiveServer) -> None:
    for query in ("key=abc", "a=1&api_key=abc", "token=abc"):
        answer = httpx.get(f"{live.url}/v1/models?{query}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "key_in_url")
        assert "abc" not in answer.text
    assert httpx.get(f"{live.url}/v1/models?limit=2").status_code == 200


def test_pages_of_allowed_origins_may_call(live: LiveServer) -> None:
    url = live.url + "/v1/chat/completions"
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    told = httpx.options(url, headers={"origin": ORIGIN} | asks)
    assert (told.status_code, told.headers["access-control-allow-origin"]) == (204, ORIGIN)
    assert told.headers["access-control-allow-methods"] == "POST"
    assert told.headers["access-control-allow-headers"] == "authorization, content-type"
    answer = httpx.post(url, json=CHAT | {"n": 0}, headers={"origin": ORIGIN})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (400, ORIGIN), "it can read why"
    strange = {"origin": "https://evil.example"}
    refused = httpx.options(url, headers=strange | asks)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "origin_not_allowed")
    for one in (refused, httpx.get(live.url + "/v1/models", headers=strange)):
        assert not [name for name in one.headers if name.startswith("access-control")]
    assert httpx.options(url, headers={"origin": ORIGIN}).status_code == 405, "that is no preflight"


def test_an_origin_that_no_browser_sends_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"cors_origins names 'example.com': give origins as browsers do"):
        ServerConfig(cors_origins=("example.com",))
