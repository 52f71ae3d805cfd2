"""One HTTP GET that asks a process how it is."""

from __future__ import annotations

import asyncio
import contextlib
from urllib.parse import urlsplit


async def probe(url: str, timeout_s: float) -> str | None:
    """Return None when `url` answers 200, otherwise what is wrong, in a few words."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(timeout_s):
            return await _get(parts.hostname or "127.0.0.1", parts.port or 80, parts.path)
    except TimeoutError:
        return f"{parts.path} did not answer within {timeout_s:g} s"
    except ConnectionRefusedError:
        return "does not listen yet"
    except ValueError:  # a first line without end
        return f"{parts.path} did not answer in HTTP"
    except OSError as error:
        return f"{parts.path}: {error}"


async def _get(host: str, port: int, path: str) -> str | None:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        request = f"GET {path} HTTP/1.1\r\nhost: {host}:{port}\r\nuser-agent: pagefleet-up\r\nconnection: close\r\n\r\n"
        writer.write(request.encode("ascii"))
        await writer.drain()
        words = (await reader.readline()).split()
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
        return f"{path} did not answer in HTTP"
    return None if words[1] == b"200" else f"{path} answers {words[1].decode('ascii', 'replace')}"
