"""An engine that answers at once, for measuring routers: asyncio protocols on uvloop, nothing computed.

Serves the completions routes whole or streamed, /readyz and the metrics that a router polls. Prints `ready` once it
listens on all ports.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import cast

import httptools
import uvloop
from pagefleet_protocol.metric_names import ENGINE_KV_USAGE_RATIO, ENGINE_REQUESTS_RUNNING, ENGINE_REQUESTS_WAITING

ANSWER = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"fake","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"yes"},"finish_reason":"stop"}],"usage":{"prompt_tokens":8,"completion_tokens":1,"total_tokens":9}}'
)
CHUNK = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"yes "}}]}\n\n'
METRICS = "".join(
    f'# TYPE {name} gauge\n{name}{{model_name="fake"}} 0\n'
    for name in (ENGINE_REQUESTS_RUNNING, ENGINE_REQUESTS_WAITING, ENGINE_KV_USAGE_RATIO)
).encode()


@dataclass(frozen=True)
class Behaviour:
    """How streams are paced."""

    chunks: int
    first_after_s: float
    gap_s: float


class EngineProtocol(asyncio.Protocol):
    """One connection."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", b""
        self._transport: asyncio.Transport | None = None
        self._stream: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._stream:
            self._stream.cancel()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url == b"/metrics":
            self._answer(METRICS, b"text/plain")
        elif self._url.startswith(b"/v1/models"):
            self._answer(b'{"object":"list","data":[{"id":"fake","object":"model"}]}', b"application/json")
        elif b'"stream":true' in self._body.replace(b": ", b":"):
            self._stream = asyncio.get_running_loop().create_task(self._send_stream())
        else:
            self._answer(ANSWER, b"application/json")

    def _answer(self, body: bytes, kind: bytes) -> None:
        assert self._transport is not None
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
        self._transport.write(head + body)

    async def _send_stream(self) -> None:
        assert self._transport is not None
        behaviour = self._behaviour
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        await asyncio.sleep(behaviour.first_after_s)
        for _ in range(behaviour.chunks):
            self._transport.write(b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
            await asyncio.sleep(behaviour.gap_s)
        self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


async def serve(ports: list[int], behaviour: Behaviour) -> None:
    """Listen until killed."""
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(lambda: EngineProtocol(behaviour), "127.0.0.1", port) for port in ports]
    print("ready", *(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Parse the pacing and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--first-after", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=0.02)
    arguments = parser.parse_args()
    behaviour = Behaviour(arguments.chunks, arguments.first_after, arguments.gap)
    uvloop.run(serve([0] * arguments.engines, behaviour))


if __name__ == "__main__":
    main()
