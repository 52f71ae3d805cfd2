"""A Kubernetes API server that knows EndpointSlices of one namespace, and every way of failing that tests ask for.

No test in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.fakes.free_ports import free_ports

PATH = "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices"
SELECTOR = "kubernetes.io/service-name=qwen-engine"
Slice = dict[str, Any]


def make_slice(name: str, *endpoints: Slice, port: int = 8000, family: str = "IPv4") -> Slice:
    """Return a slice as an API server would."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "ns", "labels": {"kubernetes.io/service-name": "qwen-engine"}},
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
    }


def pod(name: str, address: str = "127.0.0.1", *, ready: bool | None = True, **conditions: bool | None) -> Slice:
    """Return one endpoint of a slice."""
    return {
        "addresses": [address],
        "conditions": {"ready": ready, "serving": ready, "terminating": False, **conditions},
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "name": name, "namespace": "ns", "uid": f"uid-of-{name}"},
    }


def leaving(name: str, address: str = "127.0.0.1", *, serving: bool = True) -> Slice:
    """Return the endpoint of a pod that terminates."""
    return pod(name, address, ready=False, serving=serving, terminating=True)


@dataclass
class Refusal:
    """What every request is answered with."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)


class SliceServer:
    """Lists and watches. `put` and `delete` change slices as a controller would; fields make it fail."""

    def __init__(self) -> None:
        self.slices: dict[str, Slice] = {}
        self.version = 100
        self.oldest = 0
        """Watches from before it get 410."""
        self.token: str | None = None
        self.refusal: Refusal | None = None
        self.list_body: bytes | None = None
        """Sent in the place of a list."""
        self.silent = False
        """Watches begin and say nothing."""
        self.watch_ends_at_once = False
        self.seen: list[dict[str, str]] = []
        """The parameters of every request, also of those refused."""
        self.paths: set[str] = set()
        self.port = 0
        self._watches: list[asyncio.Queue[bytes | None]] = []
        self._history: list[tuple[int, bytes]] = []
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def num_lists(self) -> int:
        return sum("watch" not in one for one in self.seen)

    @property
    def num_watches(self) -> int:
        return len(self.seen) - self.num_lists

    @property
    def num_open(self) -> int:
        return len(self._watches)

    def put(self, one: Slice) -> None:
        """Create or replace a slice, and tell the watches."""
        kind = "MODIFIED" if one["metadata"]["name"] in self.slices else "ADDED"
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self.slices[one["metadata"]["name"]] = one
        self._tell(kind, one)

    def delete(self, name: str) -> None:
        """Delete a slice, and tell the watches."""
        one = self.slices.pop(name)
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self._tell("DELETED", one)

    def change_unseen(self, one: Slice) -> None:
        """Change a slice without an event, as when the history has been compacted meanwhile."""
        self.version += 1
        self.slices[one["metadata"]["name"]] = one
        self.oldest = self.version

    def bookmark(self) -> None:
        """Tell the watches how far they are."""
        self.version += 1
        metadata = {"resourceVersion": str(self.version)}
        self.send(json.dumps({"type": "BOOKMARK", "object": {"kind": "EndpointSlice", "metadata": metadata}}).encode())

    def send_error(self, code: int) -> None:
        """Send an ERROR event."""
        self.send(json.dumps({"type": "ERROR", "object": {"kind": "Status", "code": code, "reason": "R"}}).encode())

    def send(self, line: bytes) -> None:
        """Send any line to all watches."""
        for queue in self._watches:
            queue.put_nowait(line)

    def drop_watches(self) -> None:
        """Break every watch's connection."""
        for queue in self._watches:
            queue.put_nowait(None)

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen, on the same port as before."""
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01)
        await self._runner.setup()
        self.port = self.port or free_ports()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls).start()

    async def stop(self) -> None:
        """Stop listening, and break every connection."""
        self.drop_watches()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _tell(self, kind: str, one: Slice) -> None:
        line = json.dumps({"type": kind, "object": one}).encode()
        self._history.append((self.version, line))
        self.send(line)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(dict(request.query))
        self.paths.add(request.path)
        if self.refusal is not None:
            return web.Response(status=self.refusal.status, headers=self.refusal.headers)
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            return web.Response(status=401)
        if request.path != PATH or request.query.get("labelSelector") != SELECTOR:
            return web.Response(status=404)
        if "watch" in request.query:
            return await self._watch(request)
        if self.list_body is not None:
            return web.Response(body=self.list_body)
        return web.json_response(
            {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.slices.values())}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        if version < self.oldest:
            return web.Response(status=410)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.watch_ends_at_once:
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watches.append(queue)
        try:
            for at, line in self._history:
                if at > version:
                    queue.put_nowait(line)
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while (line := await queue.get()) is not None:  # type: ignore[assignment]
                    if not self.silent:
                        await response.write(line + b"\n")
            if request.transport is not None:
                request.transport.abort()
        except (TimeoutError, ConnectionError):
            pass
        finally:
            self._watches.remove(queue)
        return response


@contextlib.asynccontextmanager
async def slice_server() -> AsyncIterator[SliceServer]:
    """Run one."""
    server = SliceServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def until(condition: Callable[[], bool], within: float = 120.0) -> None:
    """Wait for something that other tasks bring about."""
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
