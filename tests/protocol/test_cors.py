"""Who may call from a browser, and what keys in URLs look like."""

from __future__ import annotations

import pytest
from pagefleet_protocol.cors import CorsError, allow, is_preflight
from pagefleet_protocol.key_file import has_key_in_query


def test_single_origins_are_named_and_caches_told() -> None:
    cors = allow(["https://chat.example.com", "http://localhost:3000"])
    assert cors is not None
    told = dict(cors.headers("http://localhost:3000"))
    assert told["access-control-allow-origin"] == "http://localhost:3000"
    assert told["vary"] == "origin"
    assert "access-control-allow-credentials" not in told
    assert "x-request-id" in told["access-control-expose-headers"]
    for stranger in (
        "https://evil.example",
        "http://localhost:3001",
        "null",
        "https://chat.example.com.evil.example",
        "",
    ):
        assert cors.headers(stranger) == (("vary", "origin"),)
        assert not cors.allows(stranger)
    assert cors.headers(None) == (("vary", "origin"),)


def test_a_star_allows_all_without_credentials() -> None:
    cors = allow(["*"])
    assert cors is not None
    told = dict(cors.headers("https://any.example"))
    assert told["access-control-allow-origin"] == "*"
    assert not any("credentials" in name for name in told)
    assert cors.headers(None) == ()
    assert cors.allows("null")


def test_a_preflight_is_told_what_may_be_sent() -> None:
    cors = allow(["*"])
    assert cors is not None
    told = dict(cors.preflight("authorization, x-stainless-os", ("POST",)))
    assert told["access-control-allow-methods"] == "POST"
    assert told["access-control-allow-headers"] == "authorization, x-stainless-os"
    assert "access-control-allow-headers" not in dict(cors.preflight("a\r\nset-cookie: b", ("POST",)))
    assert "access-control-allow-headers" not in dict(cors.preflight(None, ("GET", "HEAD")))
    assert is_preflight("OPTIONS", {b"origin": b"a", b"access-control-request-method": b"POST"})
    assert not is_preflight("OPTIONS", {b"origin": b"a"})
    assert not is_preflight("POST", {b"origin": b"a", b"access-control-request-method": b"POST"})


@pytest.mark.parametrize(
    "origin", ["chat.example.com", "https://chat.example.com/", "https://a b", "HTTPS://A", "https://*.example.com", ""]
)
def test_an_origin_is_written_as_browsers_do(origin: str) -> None:
    with pytest.raises(CorsError, match="as browsers do"):
        allow([origin])


def test_a_default_port_never_matches_so_it_is_refused() -> None:
    for origin in ("https://a.example:443", "http://a.example:80"):
        with pytest.raises(CorsError, match="leave the port out"):
            allow([origin])
    assert allow(["https://a.example:80", "http://a.example:443"]) is not None
    assert allow([]) is None


@pytest.mark.parametrize(
    "query", ["key=a", "a=1&api_key=b", "token=", "API_KEY=x", "api%5Fkey=x", "a=1;token=2", "token"]
)
def test_keys_in_queries_are_seen(query: str) -> None:
    assert has_key_in_query(query)


@pytest.mark.parametrize("query", ["", "limit=2&after=item_1", "order=token", "monkey=1", "include[]=key"])
def test_other_queries_are_not(query: str) -> None:
    assert not has_key_in_query(query)
