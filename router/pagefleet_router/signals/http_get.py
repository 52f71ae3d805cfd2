"""One small GET to an engine, on a connection of its own: probes must not queue behind requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagefleet_router.config import check_engine_url

MAX_ANSWER_BYTES = 4 * 2**20


class ProbeError(Exception):
    """No usable answer; the message is for the log."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """What came back. Of a header given twice the last one counts."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    """By names in lower case."""


async def get(url: str, path: str, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES) -> ProbeAnswer:
    """Return the answer to `GET url + path`, whose body may have `max_bytes`.

    Raises:
        ProbeError: no connection, no HTTP, too much, or not in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(*check_engine_url(url), path, max_bytes)
    except TimeoutError as error:
        raise ProbeError(f"no answer in {timeout_s:g} s") from error
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise ProbeError(str(error) or type(error).__name__) from error


async def _get(host: str, port: int, path: str, max_bytes: int) -> ProbeAnswer:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # HTTP/1.0: the answer is never chunked, and it ends with the connection.
        writer.write(f"GET {path} HTTP/1.0\r\nhost: {host}:{port}\r\nuser-agent: pagefleet-router\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ", 2)
        if len(words) < 2 or not words[0].startswith("HTTP/1.") or not (words[1].isascii() and words[1].isdigit()):
            raise ProbeError("the answer is not HTTP")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, colon, value in pairs if colon}
        return ProbeAnswer(int(words[1]), await _read_body(reader, headers, max_bytes), headers)
    finally:
        writer.transport.abort()


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str], max_bytes: int) -> bytes:
    if "content-length" in headers:
        length = int(headers["content-length"])
        if not 0 <= length <= max_bytes:
            raise ProbeError("the answer is too large")
        return await reader.readexactly(length)
    parts, size = [], 0
    while part := await reader.read(65536):
        size += len(part)
        if size > max_bytes:
            raise ProbeError("the answer is too large")
        parts.append(part)
    return b"".join(parts)
