"""HTTP that follows a redirect only where one may lead: not endlessly, not to a weaker scheme, not with credentials to
another host, and not from a public source into a private network.

A hub answers with redirects to where the bytes are, so some must be followed. A source that is itself in a private
network, as a mirror is, may redirect there.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from pagefleet_protocol.version import VERSION
from yarl import URL

from pagefleet_download.errors import BadSettings

MAX_REDIRECTS = 5
CHUNK = 1 << 20
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CONNECT_S = 20.0


class RedirectRefused(BadSettings):
    """The source sends us where it may not."""


def next_place(here: URL, location: str) -> URL:
    """Return where a redirect leads.

    Raises:
        RedirectRefused: nobody should go there; the message does not repeat what may be signed.
    """
    try:
        place = here.join(URL(location, encoded=True))  # it is signed as it is
        host = place.host or ""
    except ValueError:
        raise RedirectRefused(f"{here.host} redirects to no URL: use another endpoint") from None
    if place.scheme not in ("https", here.scheme) or place.scheme not in ("http", "https"):
        raise RedirectRefused(f"{here.host} redirects from {here.scheme}:// to {place.scheme}://: use another endpoint")
    if not host or place.user is not None or place.password is not None:
        raise RedirectRefused(f"{here.host} redirects to a URL with credentials or without host: use another endpoint")
    return place


class PublicOnly(AbstractResolver):
    """Looks names up; those to which a public source redirects keep their public addresses alone.

    The look-up is what the connection then uses: no second one can give another answer.
    """

    def __init__(self, source: str, inner: AbstractResolver) -> None:
        self._source = source
        self._inner = inner
        self._source_is_public = _is_public(source)
        self._redirected_to: set[str] = set()
        """Other names, as of a proxy, are ours to trust."""

    def redirected_to(self, host: str) -> None:
        """Take note of where a redirect leads.

        Raises:
            RedirectRefused: it is a private address, and the source is public.
        """
        if host != self._source:
            self._redirected_to.add(host)
            if self._source_is_public and not _is_public(host):
                raise self._refusal(host)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._inner.resolve(host, port, family)
        public = [one for one in found if _is_public(one["host"])]
        if host == self._source:
            self._source_is_public = len(public) == len(found)
        elif self._source_is_public and host in self._redirected_to:
            if not public:
                raise self._refusal(host)
            return public
        return found

    async def close(self) -> None:
        await self._inner.close()

    def _refusal(self, host: str) -> RedirectRefused:
        return RedirectRefused(f"{self._source} is public and redirects to {host}, which is private: refused")


class GuardedHttp:
    """GET requests to one source, and where it redirects to."""

    def __init__(self, session: aiohttp.ClientSession, guard: PublicOnly, endpoint: str, token: str | None) -> None:
        self._session = session
        self._guard = guard
        self._origin = URL(endpoint).origin()
        self._token = token

    @asynccontextmanager
    async def get(self, url: URL, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask for a URL of the source; the answer is no redirect.

        Raises:
            RedirectRefused: a redirect is not to be followed, or there are too many.
            aiohttp.ClientError: the source or whoever it redirects to cannot be reached.
            OSError: the same.
        """
        for _ in range(MAX_REDIRECTS + 1):
            own = url.origin() == self._origin
            named = {**headers, **({"Authorization": f"Bearer {self._token}"} if own and self._token else {})}
            async with self._session.get(url, headers=named, allow_redirects=False) as response:
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or location is None:
                    yield response
                    return
                url = next_place(url, location)
                self._guard.redirected_to(url.host or "")
        raise RedirectRefused(f"{self._origin} redirects more than {MAX_REDIRECTS} times: use another endpoint")


@asynccontextmanager
async def open_guarded(endpoint: str, token: str | None) -> AsyncIterator[GuardedHttp]:
    """Connect to a source; its token goes to it alone. Proxies are the environment's."""
    guard = PublicOnly(URL(endpoint).host or "", aiohttp.DefaultResolver())
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=guard),
        headers={"User-Agent": f"pagefleet/{VERSION}", "Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=True,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        read_bufsize=CHUNK,
    ) as session:
        yield GuardedHttp(session, guard, endpoint, token)


def _is_public(host: str) -> bool:
    """Whether an address is one of the Internet; a name counts as public until it is looked up."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host != "localhost"
    mapped = cast("ipaddress.IPv4Address | None", getattr(address, "ipv4_mapped", None))
    return (mapped or address).is_global
