"""One small GET to an engine, on a connection of its own: probes must not queue behind requests."""

from __future__ import annotations

import asyncio

from pagefleet_router.config import check_engine_url

_MAX_ANSWER_BYTES = 4 * 2**20


class ProbeError(Exception):
    """No usable answer; the message is for the log."""


async def get(url: str, path: str, timeout_s: float) -> tuple[int, bytes]:
    """Return status and body of `GET url + path`.

    Raises:
        ProbeError: no connection, no HTTP, too much, or not in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(*check_engine_url(url), path)
    except TimeoutError as error:
        raise ProbeError(f"no answer in {timeout_s:g} s") from error
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise ProbeError(str(error) or type(error).__name__) from error


async def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        # HTTP/1.0: the answer is never chunked, and it ends with the connection.
        writer.write(f"GET {path} HTTP/1.0\r\nhost: {host}:{port}\r\nuser-agent: pagefleet-router\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        words = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise ProbeError("the answer is not HTTP")
        return int(words[1]), await _read_body(reader, head)
    finally:
        writer.transport.abort()


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length":
            length = int(value)
            if not 0 <= length <= _MAX_ANSWER_BYTES:
                raise ProbeError("the answer is too large")
            return await reader.readexactly(length)
    parts, size = [], 0
    while part := await reader.read(65536):
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            raise ProbeError("the answer is too large")
        parts.append(part)
    return b"".join(parts)
