"""HTTP that follows a redirect only where one may lead: not endlessly, not to a weaker scheme, not with credentials to
another host, and not from a public source into a private network.

A hub answers with redirects to where the bytes are, so some must be followed. A source that is itself in a private
network, as a mirror is, may redirect there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType
from typing import cast

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from pagefleet_protocol.version import VERSION
from yarl import URL

from pagefleet_download.errors import BadSettings, DownloadError, EndedEarly, Interrupted, said

MAX_REDIRECTS = 5
_FOR_ONE = ("authorization", "cookie")
CHUNK = 1 << 20
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CONNECT_S = 20.0
_ANSWER_S = 20.0
Refusal = Callable[[int, Mapping[str, str]], DownloadError | Interrupted]


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

    def __init__(
        self, session: aiohttp.ClientSession, guard: PublicOnly, endpoint: str, credentials: Mapping[str, str]
    ) -> None:
        self._session = session
        self._guard = guard
        self._endpoint = endpoint
        self._origin = URL(endpoint).origin()
        self.credentials = credentials
        """Headers for the source alone."""

    async def read(
        self, url: URL, headers: Mapping[str, str], start: int, name: str, refusal: Refusal
    ) -> AsyncGenerator[bytes]:
        """Yield the bytes of an answer from `start` on, which `headers` may have asked for. Pieces may be empty.

        Args:
            name: of what is read, for errors.
            refusal: returns what an answer with a status of 300 or more, and headers by lower-case names, means.

        Raises:
            Interrupted: the source failed.
            DownloadError: what `refusal` returned; or the source cannot be asked.
        """
        try:
            async with self.get(url, headers) as response:
                if response.status == 416 and start:
                    raise EndedEarly(f"{name} ends before byte {start}")
                if response.status >= 300:
                    said_more = {name.lower(): value for name, value in response.headers.items()}
                    if response.url.origin() != self._origin:  # nobody else says where credentials go
                        said_more.pop("www-authenticate", None)
                    raise refusal(response.status, said_more)
                skip = _bytes_before(response, start)
                async for chunk in response.content.iter_chunked(CHUNK):
                    yield chunk[skip:]  # also an empty one: something arrived
                    skip = max(0, skip - len(chunk))
        except (aiohttp.ClientError, OSError) as error:
            raise Interrupted(f"{self._endpoint}: {name}: {said(error)}") from error
        except ValueError as error:
            # aiohttp takes credentials from there, and then does not know which to send.
            raise BadSettings(
                f"{self._endpoint} cannot be asked ({said(error)}): is there an entry for it in ~/.netrc?"
            ) from error

    async def read_all(
        self, url: URL, most: int, name: str, refusal: Refusal, headers: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        """Return a whole answer of at most `most` bytes, in the time that an answer may take.

        Raises:
            Interrupted, DownloadError: as `read`; BadSettings also where it is longer.
        """
        data = bytearray()
        try:
            async with asyncio.timeout(_ANSWER_S), aclosing(self.read(url, headers, 0, name, refusal)) as chunks:
                async for chunk in chunks:
                    data += chunk
                    if len(data) > most:
                        raise BadSettings(f"{self._endpoint}: {name} is longer than such things are: check it")
        except TimeoutError as error:
            raise Interrupted(f"{self._endpoint}: {name} did not come") from error
        return bytes(data)

    def elsewhere(self, url: str) -> URL:
        """Return a URL that the source named, for `read` without the source's credentials.

        Raises:
            RedirectRefused: nobody should go there, as with a redirect.
        """
        place = next_place(URL(self._endpoint), url)
        self._guard.redirected_to(place.host or "")
        return place

    @asynccontextmanager
    async def get(
        self, url: URL, headers: Mapping[str, str], method: str = "GET"
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Ask for a URL of the source, or one that it named; the answer is no redirect. What `headers` has for who is
        asked goes to nobody else.

        Raises:
            RedirectRefused: a redirect is not to be followed, or there are too many.
            aiohttp.ClientError: the source or whoever it redirects to cannot be reached.
            OSError: the same.
        """
        asked, others = url.origin(), {name: headers[name] for name in headers if name.lower() not in _FOR_ONE}
        for _ in range(MAX_REDIRECTS + 1):
            named = headers if url.origin() == asked else others
            if url.origin() == self._origin:
                named = {**named, **self.credentials}
            async with self._session.request(method, url, headers=named, allow_redirects=False) as response:
                location = response.headers.get("Location")
                if response.status not in _REDIRECTS or location is None:
                    yield response
                    return
                url = next_place(url, location)
                self._guard.redirected_to(url.host or "")
        raise RedirectRefused(f"{self._origin} redirects more than {MAX_REDIRECTS} times: use another endpoint")


@asynccontextmanager
async def open_guarded(endpoint: str, credentials: Mapping[str, str]) -> AsyncIterator[GuardedHttp]:
    """Connect to a source; its credentials go to it alone. Proxies are the environment's."""
    guard = PublicOnly(URL(endpoint).host or "", aiohttp.DefaultResolver())
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=guard),
        headers={"User-Agent": f"pagefleet/{VERSION}", "Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=True,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        read_bufsize=CHUNK,
    ) as session:
        yield GuardedHttp(session, guard, endpoint, credentials)


def bearer(token: str | None) -> Mapping[str, str]:
    """Return the header that has a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a source wants to be left alone for."""
    value = headers.get("retry-after", "").strip()
    return float(value) if value.isascii() and value.isdecimal() and len(value) < 10 else None


def _bytes_before(response: aiohttp.ClientResponse, start: int) -> int:
    """How many bytes of the answer's body come before `start`."""
    if response.status != 206:
        return start
    if not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise Interrupted(f"{response.url.host} sent another range than was asked for")
    return 0


def _is_public(host: str) -> bool:
    """Whether an address is one of the Internet; a name counts as public until it is looked up."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host != "localhost"
    mapped = cast("ipaddress.IPv4Address | None", getattr(address, "ipv4_mapped", None))
    return (mapped or address).is_global
