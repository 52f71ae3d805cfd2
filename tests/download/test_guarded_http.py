"""Where a redirect may lead, and what goes along."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from aiohttp.abc import AbstractResolver, ResolveResult
from pagefleet_download.guarded_http import PublicOnly, RedirectRefused, next_place
from yarl import URL

from tests.fakes.downloads import fast, run, visible
from tests.fakes.hub_server import ContentServer, HubServer
from tests.fakes.model_files import WANTED, sharded

URI = "hf://org/model"
PUBLIC, PRIVATE = "93.184.216.34", "10.1.2.3"


@pytest.mark.parametrize(
    ("here", "location", "place"),
    [
        ("https://hub.example/a/b", "/c?x=%2F~", "https://hub.example/c?x=%2F~"),
        ("https://hub.example/a/b", "https://cdn.example/c?s=a%2Bb", "https://cdn.example/c?s=a%2Bb"),
        ("http://mirror/a", "http://store/c", "http://store/c"),
        ("http://mirror/a", "https://store/c", "https://store/c"),
    ],
)
def test_where_a_redirect_leads(here: str, location: str, place: str) -> None:
    assert str(next_place(URL(here), location)) == place


@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("http://hub.example/c", "redirects from https:// to http://"),
        ("ftp://hub.example/c", "redirects from https:// to ftp://"),
        ("file:///etc/passwd", "redirects from https:// to file://"),
        ("https://me:hidden@cdn.example/c", "with credentials or without host"),
        ("https://[::1/c", "to no URL"),
        ("https://cdn.example:99999/c", "to no URL"),
    ],
)
def test_where_none_may_lead(location: str, says: str) -> None:
    with pytest.raises(RedirectRefused, match=says) as refused:
        next_place(URL("https://hub.example/a"), location)
    assert "hidden" not in str(refused.value)


class Names(AbstractResolver):
    """Knows a few names."""

    def __init__(self, **addresses: list[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        return [
            ResolveResult(hostname=host, host=one, port=port, family=family, proto=0, flags=0)
            for one in self._addresses[host]
        ]

    async def close(self) -> None:
        pass


def looked_up(guard: PublicOnly, host: str) -> list[str]:
    return [one["host"] for one in asyncio.run(guard.resolve(host))]


def test_a_public_source_does_not_lead_into_a_private_network() -> None:
    guard = PublicOnly("hub", Names(hub=[PUBLIC], inside=[PRIVATE, "::1"], both=[PRIVATE, PUBLIC], proxy=[PRIVATE]))
    assert looked_up(guard, "hub") == [PUBLIC]
    assert looked_up(guard, "proxy") == [PRIVATE]
    for host in ("inside", "both"):
        guard.redirected_to(host)
    assert looked_up(guard, "both") == [PUBLIC]
    with pytest.raises(RedirectRefused, match="hub is public and redirects to inside, which is private"):
        looked_up(guard, "inside")


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        PRIVATE,
        "169.254.169.254",
        "::1",
        "fd00::1",
        "::ffff:10.1.2.3",
        "0.0.0.0",
        "100.64.0.1",
        "localhost",
    ],
)
def test_an_address_needs_no_look_up_to_be_refused(host: str) -> None:
    with pytest.raises(RedirectRefused):
        PublicOnly("hub", Names()).redirected_to(host)


def test_a_mirror_in_a_private_network_may_lead_there() -> None:
    guard = PublicOnly("hub", Names(hub=[PRIVATE], store=[PRIVATE]))
    looked_up(guard, "hub")
    guard.redirected_to("store")
    assert looked_up(guard, "store") == [PRIVATE]


def test_an_endless_chain_ends_without_another_attempt(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    hub.redirects = {"config.json": "config.json"}
    result = run(URI, tmp_path, fast(endpoint=hub.url))
    assert (result.reason, "redirects more than 5 times" in result.message) == ("BadSettings", True)
    assert len(hub.requests_for("config.json")) == 6


def test_a_renamed_repository_is_found_with_the_token(hub: HubServer, tmp_path: Path) -> None:
    hub.repositories["org/model"].commit(sharded())
    hub.repositories["org/model"].private = True
    hub.redirects = {"old": "/api/models/org/model/revision/main?blobs=true"}
    result = run(URI, tmp_path, fast(endpoint=hub.url, token="hf_right", revision="old"))
    assert result.reason == ""
    assert visible(tmp_path) == WANTED


def test_the_list_of_files_takes_no_token_elsewhere(hub: HubServer, tmp_path: Path) -> None:
    with ContentServer() as elsewhere:
        hub.redirects = {"main": f"{elsewhere.url}/api/models/org/model"}
        assert run(URI, tmp_path, fast(endpoint=hub.url, token="hf_right")).reason == "AccessDenied"
        assert [seen.headers.get("authorization") for seen in elsewhere.seen] == [None]
