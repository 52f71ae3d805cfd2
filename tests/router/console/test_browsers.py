"""What the router does for browsers: the page, CORS, and no keys in URLs."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import uvloop
from pagefleet_router.config import RouterConfig
from pagefleet_router.errors import ConfigError

from tests.fakes.faulty_engine import CHAT, chat, fleet, post, stream, whole

HTML = "accept: text/html,application/xhtml+xml;q=0.9,*/*;q=0.8\r\n"
OURS, STRANGE = "origin: https://chat.example.com\r\n", "origin: https://evil.example\r\n"
WANTS = "access-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type\r\n"


def test_a_browser_gets_the_page_and_a_program_what_it_got_before(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red\n")

    async def scenario() -> None:
        async with fleet(tmp_path, whole(), api_key_file=keys) as f:
            page = await f.get("/", HTML)
            assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
            assert page.headers["x-content-type-options"] == "nosniff"
            small = await f.get("/", HTML + "accept-encoding: gzip, br\r\n")
            assert small.headers["content-encoding"] == "gzip"
            assert gzip.decompress(small.body) == page.body
            same = await f.get("/", f"{HTML}if-none-match: {page.headers['etag']}\r\n")
            assert (same.status, same.body) == (304, b"")
            assert (await f.get("/?from=link", HTML)).body == page.body
            head = await f.ask(f"HEAD / HTTP/1.1\r\nhost: r\r\n{HTML}connection: close\r\n\r\n".encode())
            assert (head.status, head.body) == (200, b"")
            assert (await f.get("/", "accept: */*\r\n")).status == 401
            assert (await f.get("/")).status == 401
            with_key = await f.get("/", "x-api-key: one\r\n")
            assert (with_key.status, with_key.error["code"]) == (404, "unknown_url")
            for path in ("/console/", "/console/../page", "/console/no.js", "/console/state/", "/console"):
                assert (await f.get(path, HTML + "x-api-key: one\r\n")).status == 404, path

    uvloop.run(scenario())


def test_the_api_is_described_to_everybody(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red\n")

    async def scenario() -> None:
        async with fleet(tmp_path, whole(), api_key_file=keys) as f:
            described = await f.get("/openapi.json")
            assert (described.status, described.json["openapi"]) == (200, "3.1.0")
            assert CHAT in described.json["paths"]
            page = await f.get("/docs")
            assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert page.headers["content-security-policy"].startswith("default-src 'none'")

    uvloop.run(scenario())


def test_no_console_means_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole(), console=False) as f:
            for path in ("/", "/docs", "/openapi.json", "/console/state", "/console/app.js"):
                assert (await f.get(path, HTML)).status == 404, path
            assert (await f.ask(post(chat()))).status == 200

    uvloop.run(scenario())


def test_a_key_in_a_url_is_refused_before_anything_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, whole()) as f:
            for path in ("/?key=abc", "/console/state?api_key=abc", "/v1/models?x=1&token=abc", f"{CHAT}?api%5Fkey=a"):
                answer = await f.get(path, HTML)
                assert (answer.status, answer.error["code"]) == (400, "key_in_url"), path
                assert "Authorization: Bearer" in answer.error["message"]
                assert "abc" not in answer.body.decode()
            assert (await f.get("/v1/models?limit=2")).status == 200
            assert not f.engines[0].seen

    uvloop.run(scenario())


def test_pages_of_allowed_origins_may_call_and_others_get_no_word(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red\n")
    told = "x-frame: a\r\naccess-control-allow-origin: *\r\naccess-control-allow-credentials: true\r\n"

    async def scenario() -> None:
        async with fleet(
            tmp_path, whole(extra=told), api_key_file=keys, cors_origins=("https://chat.example.com",)
        ) as f:
            key = "authorization: Bearer one\r\n"
            answer = await f.ask(post(chat(), headers=OURS + key))
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "https://chat.example.com")
            assert "access-control-allow-credentials" not in answer.headers, (
                "what an engine says of that does not count"
            )
            assert answer.headers["x-frame"] == "a"
            refused = await f.ask(post(chat(), headers=OURS))
            assert (refused.status, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example.com")
            models = await f.get("/v1/models", STRANGE + key)
            assert models.status == 200
            assert not [name for name in models.headers if name.startswith("access-control")]
            assert models.headers["vary"] == "origin"

    uvloop.run(scenario())


def test_a_preflight_needs_no_key_and_a_strange_one_is_told_why(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one tenant=red\n")

    def preflight(origin: str) -> bytes:
        return f"OPTIONS {CHAT} HTTP/1.1\r\nhost: r\r\n{origin}{WANTS}\r\n".encode()

    async def scenario() -> None:
        async with fleet(tmp_path, whole(), api_key_file=keys, cors_origins=("https://chat.example.com",)) as f:
            answer = await f.ask(preflight(OURS))
            assert answer.status == 204
            assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
            assert answer.headers["access-control-allow-methods"] == "POST"
            assert answer.headers["access-control-allow-headers"] == "authorization,content-type"
            strange = await f.ask(preflight(STRANGE))
            assert (strange.status, strange.error["code"]) == (403, "origin_not_allowed")
            assert not [name for name in strange.headers if name.startswith("access-control")]
            plain = await f.ask(f"OPTIONS {CHAT} HTTP/1.1\r\nhost: r\r\n{OURS}\r\n".encode())
            assert plain.status == 401, "that is no preflight"
        async with fleet(tmp_path, whole()) as f:
            off = await f.ask(preflight(OURS))
            assert (off.status, off.headers["allow"]) == (405, "POST")
            assert "access-control-allow-origin" not in off.headers

    uvloop.run(scenario())


def test_a_stream_of_any_origin_has_the_star(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path, stream([b"data: 1\n\n"]), cors_origins=("*",)) as f:
            answer = await f.ask(post(chat(stream=True), headers=STRANGE))
            assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
            assert "x-request-id" in answer.headers["access-control-expose-headers"]

    uvloop.run(scenario())


def test_an_origin_that_no_browser_sends_is_a_mistake_in_the_settings() -> None:
    with pytest.raises(ConfigError, match=r"cors_origins names 'example.com/': give origins as browsers do"):
        RouterConfig(engine=("http://a:1",), model_name="m", cors_origins=("example.com/",))
