"""A way from the test into a Service: a loopback port whose connections come out of a pod of the cluster.

The pod asks cluster DNS and goes through the Service's address, as an application's pod does; only the way to the pod
is port forwarding by the API server. So any client of this machine, OpenAI's included, can be the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import aiohttp
from kubernetes import client

from e2e.kubernetes.cluster import Cluster, restricted_pod, wait_until

RELAY = Path(__file__).with_name("relay.py")
PORT = 8000
DATA, ERROR = 0, 1  # the two channels of a forwarded port


class PortForward:
    """Loopback connections to one port of one pod, through the API server. Lives in one event loop."""

    def __init__(self, cluster: Cluster, namespace: str, pod: str, port: int) -> None:
        self._configuration = cluster.connection.configuration
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/portforward?ports={port}"
        self._url = f"{self._configuration.host}{path}"
        self._stack = contextlib.AsyncExitStack()
        self._open: set[asyncio.Task[None]] = set()

    async def listen(self) -> int:
        """Return the loopback port."""
        connector = aiohttp.TCPConnector(ssl=tls(self._configuration), limit=0)
        self._stack.push_async_callback(self._cancel_open)
        http = await self._stack.enter_async_context(aiohttp.ClientSession(connector=connector))

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._open.add(task)
            try:
                with contextlib.suppress(OSError, aiohttp.ClientError, asyncio.CancelledError):
                    await self._forward(http, reader, writer)
            finally:
                self._open.discard(task)
                writer.close()

        server = await asyncio.start_server(accepted, "127.0.0.1", 0)
        self._stack.callback(server.close)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        await self._cancel_open()
        await self._stack.aclose()
        await asyncio.sleep(0.25)  # TLS connections say goodbye after aiohttp calls them closed

    async def _cancel_open(self) -> None:
        found = tuple(self._open)
        for task in found:
            task.cancel()
        await asyncio.gather(*found, return_exceptions=True)

    async def _forward(
        self, http: aiohttp.ClientSession, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        token = self._configuration.get_api_key_with_prefix("authorization")
        headers = {"Authorization": str(token)} if token else {}
        protocols = ("v4.channel.k8s.io",)
        async with http.ws_connect(self._url, headers=headers, protocols=protocols, max_msg_size=0) as socket:
            upwards = asyncio.create_task(send_all(reader, socket))
            try:
                await receive_all(socket, writer)
            finally:
                upwards.cancel()
                await asyncio.gather(upwards, return_exceptions=True)


class PodTunnel:
    """Use as a context manager; `url` is a port of one pod from here, past every Service."""

    def __init__(self, cluster: Cluster, namespace: str, pod: str, port: int = PORT) -> None:
        self._forward = PortForward(cluster, namespace, pod, port)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"tunnel-{pod}")
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._forward.listen(), self._loop).result(10)
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._forward.close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


class ServiceTunnel:
    """Use as a context manager; `url` is the Service from here, without a path."""

    def __init__(self, cluster: Cluster, image: str, namespace: str, host: str, port: int = 80) -> None:
        """`host` is what an application in `namespace` would say: `qwen`, or `qwen.other.svc`."""
        self._cluster = cluster
        self._namespace = namespace
        self._pod = f"relay-{host.partition('.')[0]}"[:60]
        command = ["python", "-c", RELAY.read_text(), host, str(port)]
        probe = {"tcpSocket": {"port": PORT}, "periodSeconds": 1}
        self._document = restricted_pod(self._pod, {"image": image, "command": command, "readinessProbe": probe})
        self._tunnel = PodTunnel(cluster, namespace, self._pod)

    @property
    def url(self) -> str:
        return self._tunnel.url

    def __enter__(self) -> Self:
        self._cluster.apply(self._document, self._namespace)
        wait_until(partial(self._cluster.pod_is_ready, self._pod, self._namespace), f"pod {self._pod} is ready")
        self._tunnel.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tunnel.__exit__(kind, error, trace)
        self._cluster.delete("v1", "Pod", self._pod, self._namespace)
        # The next tunnel would take it for its own while it ends.
        wait_until(lambda: not self._cluster.get("v1", "Pod", self._pod, self._namespace), f"pod {self._pod} is gone")


async def send_all(reader: asyncio.StreamReader, socket: aiohttp.ClientWebSocketResponse) -> None:
    """Send what the client says; its end closes the way, for there is no half-closed one."""
    while data := await reader.read(65536):
        await socket.send_bytes(bytes([DATA]) + data)
    await socket.close()


async def receive_all(socket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    """Write what the pod says. Each channel begins with two bytes that repeat the port."""
    begun = set()
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel not in begun:
            begun.add(channel)
            data = data[2:]
        if channel == ERROR and data:
            return
        writer.write(data)
        await writer.drain()


def tls(configuration: client.Configuration) -> ssl.SSLContext:
    """Return the trust and the certificate that the kubeconfig names."""
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context
