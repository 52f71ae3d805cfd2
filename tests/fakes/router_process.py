"""A stand-in for `pagefleet route`: reads the endpoints file, passes requests on, retries before the first byte.

No test in here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import signal
import time
from pathlib import Path

from pagefleet_protocol import metric_names
from pagefleet_protocol.endpoints import Endpoint, decode_endpoints


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoints-file", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--policy")
    parser.add_argument("--model-name")
    parser.add_argument("--model-alias", action="append")
    parser.add_argument("--drain-timeout", type=float)
    parser.add_argument("--cold-start-timeout", type=float)
    parser.add_argument("--fleet-key-file", type=Path)
    parser.add_argument("--no-kv-events", action="store_true")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--pd-threshold", type=int)
    parser.add_argument("--pd-fallback")
    parser.add_argument("--inference-service-file", type=Path)
    parser.add_argument("--no-console", action="store_true")
    return parser.parse_args()


class FakeRouter:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.num_running = 0
        self.num_queued = 0
        """What its metrics claim; a request for /queue/N sets it."""
        self.prompt_tokens_per_s = 0
        """The same; set by /prompts/N. An engine computes 1000 of them a second."""
        self.turn = itertools.count()
        self.stopping = asyncio.Event()

    def endpoints(self) -> list[Endpoint]:
        found = decode_endpoints(self.arguments.endpoints_file.read_bytes()).endpoints
        return [endpoint for endpoint in found if not endpoint.draining and not endpoint.coming]

    async def serve(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stopping.set)
        server = await asyncio.start_server(self.answer, self.arguments.host, self.arguments.port)
        await self.stopping.wait()
        server.close()
        while self.num_running:  # noqa: ASYNC110 - a fake may poll
            await asyncio.sleep(0.01)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_running += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1]
            if path == b"/policy":
                reply = ok(self.arguments.policy.encode())
            elif path == b"/livez":
                reply = ok(b"")
            elif path == b"/metrics":
                reply = ok(self.page())
            elif path.startswith(b"/queue/"):
                self.num_queued = int(path.removeprefix(b"/queue/"))
                reply = ok(b"")
            elif path.startswith(b"/prompts/"):
                self.prompt_tokens_per_s = int(path.removeprefix(b"/prompts/"))
                reply = ok(b"")
            elif path == b"/readyz":
                reply = ok(b"") if self.endpoints() else refused()
            else:
                reply = await self.relay(head)
            writer.write(reply)
            await writer.drain()
        writer.close()
        self.num_running -= 1

    def page(self) -> bytes:
        claims = {
            metric_names.ROUTER_ARRIVALS: 0,
            metric_names.ROUTER_QUEUED: self.num_queued,
            metric_names.ROUTER_PROMPT_TOKENS: self.prompt_tokens_per_s * time.monotonic(),
            metric_names.ROUTER_PREFILL_RATE: 1000,
            metric_names.ROUTER_FLEET_ENGINES: 2,
            metric_names.ROUTER_FLEET_REQUESTS_RUNNING: 0,
        }
        return "".join(f"{name} {value}\n" for name, value in claims.items()).encode()

    async def relay(self, head: bytes) -> bytes:
        for _ in range(5):
            endpoints = self.endpoints()
            if not endpoints:
                return refused()
            url = endpoints[next(self.turn) % len(endpoints)].url
            host, port = url.removeprefix("http://").split(":")
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(head)
                reply = await reader.read()
                writer.close()
                if reply.startswith(b"HTTP/1.1 200"):
                    return reply
        return refused()


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body) + body


def refused() -> bytes:
    return b"HTTP/1.1 503 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


if __name__ == "__main__":
    asyncio.run(FakeRouter(parse()).serve())
