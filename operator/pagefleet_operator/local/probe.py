"""One HTTP GET that asks a process how it is, or what it counts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from pagefleet_protocol.load_progress import LoadProgress, decode_loading

from pagefleet_operator.autoscale.router_page import read_router_page
from pagefleet_operator.autoscale.signals import FleetWindow

_MAX_PAGE_BYTES = 1 << 20
_MAX_LOADING_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class _Answer:
    status: bytes
    """As text; empty where the answer is not HTTP."""
    rest: bytes = b""
    """What follows the status line, as far as it was read."""


async def probe(url: str, timeout_s: float) -> str | None:
    """Return None when `url` answers 200, otherwise what is wrong, in a few words."""
    problem, _ = await probe_loading(url, timeout_s, 0)
    return problem


async def probe_loading(
    url: str, timeout_s: float, most_bytes: int = _MAX_LOADING_BYTES
) -> tuple[str | None, LoadProgress | None]:
    """Do as `probe`, and return too how far a process is that loads; None where it does not say."""
    try:
        answer = await _get(url, timeout_s, most_bytes)
    except (OSError, ValueError) as error:
        return _failure(error, urlsplit(url).path, timeout_s), None
    if answer.status == b"200":
        return None, None
    path = urlsplit(url).path
    if not answer.status:
        return f"{path} did not answer in HTTP", None
    loading = decode_loading(answer.rest.partition(b"\r\n\r\n")[2])
    told = f"{path} answers {answer.status.decode('ascii', 'replace')}"
    return (told if loading is None else loading.describe()), loading


def _failure(error: OSError | ValueError, path: str, timeout_s: float) -> str:
    match error:
        case TimeoutError():
            return f"{path} did not answer within {timeout_s:g} s"
        case ConnectionRefusedError():
            return "does not listen yet"
        case ValueError():  # a first line without end
            return f"{path} did not answer in HTTP"
    return f"{path}: {error}"


async def fetch(url: str, timeout_s: float) -> bytes | None:
    """Return the body behind `url`; None where there is none: no answer, another status than 200, over 1 MiB."""
    try:
        answer = await _get(url, timeout_s, _MAX_PAGE_BYTES)
    except (OSError, ValueError):  # TimeoutError is an OSError
        return None
    _, end, body = answer.rest.partition(b"\r\n\r\n")
    return body if answer.status == b"200" and end and len(answer.rest) <= _MAX_PAGE_BYTES else None


async def _get(url: str, timeout_s: float, most_bytes: int) -> _Answer:
    """Return the answer's status, and what follows until the connection closes if `most_bytes` are wanted of it."""
    parts = urlsplit(url)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port)
        try:
            head = f"GET {parts.path} HTTP/1.1\r\nhost: {host}:{port}\r\n"
            writer.write(f"{head}user-agent: pagefleet-up\r\nconnection: close\r\n\r\n".encode("ascii"))
            await writer.drain()
            words = (await reader.readline()).split()
            rest = b""
            while most_bytes and len(rest) <= most_bytes and (piece := await reader.read(65_536)):
                rest += piece
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        return _Answer(b"")
    return _Answer(words[1], b"\r\n" + rest)


METRICS_PATH = "/metrics"


async def listen(
    window: FleetWindow, routers: Mapping[str, str], timeout_s: float
) -> tuple[float, Mapping[str, bytes]]:
    """Ask all routers at once. Returns when they spoke, in monotonic seconds, and the pages of those that did.

    Args:
        window: takes in what they say.
        routers: the base URL of each, by name.
        timeout_s: of each.
    """
    pages = await asyncio.gather(*(fetch(url + METRICS_PATH, timeout_s) for url in routers.values()))
    now = time.monotonic()
    told = {name: page for name, page in zip(routers, pages, strict=True) if page is not None}
    for name, page in told.items():
        if (reading := read_router_page(page)) is not None:
            window.add(name, reading, now)
    return now, told
