"""An engine that answers at once, for measuring routers: asyncio protocols on uvloop, nothing computed.

Serves the completions routes whole or streamed, /readyz, the metrics that a router polls, and GET /stats: what it has
counted, as JSON. Each engine remembers the last prompts' beginnings, so that /stats can say how many requests found
theirs. Prints `ready` and the ports once it listens on all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import cast

import httptools
import uvloop
from pagefleet_protocol.metric_names import ENGINE_KV_USAGE_RATIO, ENGINE_REQUESTS_RUNNING, ENGINE_REQUESTS_WAITING

ANSWER = (
    b'{"id":"x","object":"chat.completion","created":1,"model":"fake","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"yes"},"finish_reason":"stop"}],"usage":{"prompt_tokens":8,"completion_tokens":1,"total_tokens":9}}'
)
USER = b'"user":"'
"""What follows in a request's body, up to the next quote, is the id of the answer: who gets another's can tell."""
ANSWER_ID = b'"id":"x"'
CHUNK = b'data: {"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"yes "}}]}\n\n'
METRICS = "".join(
    f'# TYPE {name} gauge\n{name}{{model_name="fake"}} 0\n'
    for name in (ENGINE_REQUESTS_RUNNING, ENGINE_REQUESTS_WAITING, ENGINE_KV_USAGE_RATIO)
).encode()
_CONTENT = b'"content":'


@dataclass(frozen=True)
class Behaviour:
    """How streams are paced, and what is remembered."""

    chunks: int
    first_after_s: float
    gap_s: float
    prefix_bytes: int
    """Beginnings of prompts that count as equal; 0: nothing is remembered."""
    num_prefixes: int


@dataclass
class Counts:
    """What one engine has seen."""

    requests: int = 0
    hits: int = 0
    open_streams: int = 0
    known: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def count(self, body: bytes, behaviour: Behaviour) -> None:
        """Count a request and whether its beginning was known."""
        self.requests += 1
        if not behaviour.prefix_bytes:
            return
        start = body.find(_CONTENT)
        key = hash(body[start : start + behaviour.prefix_bytes])
        self.hits += key in self.known
        self.known[key] = None
        self.known.move_to_end(key)
        if len(self.known) > behaviour.num_prefixes:
            self.known.popitem(last=False)

    def reset(self) -> None:
        """Forget everything but what is open."""
        self.requests = self.hits = 0
        self.known.clear()


class EngineProtocol(asyncio.Protocol):
    """One connection."""

    def __init__(self, behaviour: Behaviour, counts: Counts) -> None:
        self._behaviour = behaviour
        self._counts = counts
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
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):  # routers try gRPC too
            assert self._transport is not None
            self._transport.abort()

    def on_message_begin(self) -> None:
        self._url, self._body = b"", b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if self._url == b"/metrics":
            self._answer(METRICS, b"text/plain")
        elif self._url == b"/stats":
            counts = self._counts
            stats = {"requests": counts.requests, "hits": counts.hits, "open_streams": counts.open_streams}
            self._answer(json.dumps(stats).encode(), b"application/json")
        elif self._url == b"/reset":
            self._counts.reset()
            self._answer(b"{}", b"application/json")
        elif self._url.startswith((b"/v1/models", b"/internal/", b"/get_")):
            self._answer(b'{"object":"list","data":[{"id":"fake","object":"model"}]}', b"application/json")
        elif self._url.startswith(b"/v1/"):
            self._complete()
        else:
            self._answer(b"{}", b"application/json")

    def _complete(self) -> None:
        self._counts.count(self._body, self._behaviour)
        head = (self._body[:256] + self._body[-256:]).replace(b": ", b":")
        _, told, user = head.partition(USER)
        answer_id = b'"id":"%s"' % user.partition(b'"')[0] if told else ANSWER_ID
        if b'"stream":true' in head:
            chunk = CHUNK.replace(ANSWER_ID, answer_id) if told else CHUNK
            self._stream = asyncio.get_running_loop().create_task(self._send_stream(chunk))
        else:
            self._answer(ANSWER.replace(ANSWER_ID, answer_id) if told else ANSWER, b"application/json")

    def _answer(self, body: bytes, kind: bytes) -> None:
        assert self._transport is not None
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, len(body))
        self._transport.write(head + body)

    async def _send_stream(self, chunk: bytes) -> None:
        assert self._transport is not None
        behaviour = self._behaviour
        self._counts.open_streams += 1
        try:
            self._transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            await asyncio.sleep(behaviour.first_after_s)
            for _ in range(behaviour.chunks):
                self._transport.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                await asyncio.sleep(behaviour.gap_s)
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        finally:
            self._counts.open_streams -= 1


async def serve(num_engines: int, behaviour: Behaviour) -> None:
    """Listen until killed."""
    loop = asyncio.get_running_loop()
    servers = []
    for _ in range(num_engines):
        counts = Counts()
        servers.append(
            await loop.create_server(
                lambda counts=counts: EngineProtocol(behaviour, counts),  # type: ignore[misc]
                "127.0.0.1",
                0,
                backlog=4096,
            )
        )
    print("ready", *(server.sockets[0].getsockname()[1] for server in servers), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Parse the pacing and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--first-after", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=0.02)
    parser.add_argument("--prefix-bytes", type=int, default=0)
    parser.add_argument("--prefixes", type=int, default=8)
    arguments = parser.parse_args()
    behaviour = Behaviour(
        arguments.chunks, arguments.first_after, arguments.gap, arguments.prefix_bytes, arguments.prefixes
    )
    uvloop.run(serve(arguments.engines, behaviour))


if __name__ == "__main__":
    main()
