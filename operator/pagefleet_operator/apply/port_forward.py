"""Carries connections of this machine to a port of a pod, as `kubectl port-forward` does: a WebSocket for each.

Source: Kubernetes, the subprotocol v4.channel.k8s.io. A message's first byte is its channel: 0 is data, 1 errors. Each
channel begins with the port, two bytes with the low one first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from pagefleet_protocol.kube_names import API_VERSION, PLURAL

from pagefleet_operator.apply.connection import Credentials
from pagefleet_operator.errors import Refused, Unavailable

logger = logging.getLogger(__name__)

_PROTOCOL = "v4.channel.k8s.io"
_DATA, _ERROR = 0, 1
_PORT_BYTES = 2
_READ_BYTES = 64 * 1024
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class ForwardApi:
    """Asks the API server what a port-forward needs to know. Namespaces and names are those of the cluster.

    Args:
        session: not closed here.
        server: URL of the API server.
    """

    session: aiohttp.ClientSession
    server: str

    async def services(self, namespace: str) -> list[str]:
        """Return the names of a namespace's InferenceServices.

        Raises:
            ClusterError: the API server does not say.
        """
        found = await self._list(f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}", {})
        return [item["metadata"]["name"] for item in found]

    async def ready_pods(self, namespace: str, labels: Mapping[str, str]) -> list[str]:
        """Return the names of the pods with these labels that are ready and stay.

        Raises:
            ClusterError: the API server does not say.
        """
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        found = await self._list(f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": selector})
        return [item["metadata"]["name"] for item in found if _is_ready(item)]

    async def carry(
        self, namespace: str, pod: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry one connection until either side ends it.

        Raises:
            ClusterError: the pod's port cannot be reached.
        """
        url = f"{self.server}/api/v1/namespaces/{namespace}/pods/{pod}/portforward?ports={port}"
        try:
            async with self.session.ws_connect(url, protocols=(_PROTOCOL,), max_msg_size=0) as socket:
                sending = asyncio.create_task(_send(socket, reader))
                try:
                    await _receive(socket, writer)
                finally:
                    sending.cancel()
                    await asyncio.wait({sending})
        except aiohttp.WSServerHandshakeError as error:
            raise Refused(f"pod {pod} takes no port-forward ({error.status}: {error.message})") from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"the API server cannot be reached ({error})") from error

    async def _list(self, path: str, params: Mapping[str, str]) -> list[Any]:
        limits = aiohttp.ClientTimeout(total=_ANSWER_S)
        try:
            async with self.session.get(self.server + path, params=params, timeout=limits) as response:
                body = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"the API server cannot be asked ({error or 'no answer in time'})") from error
        said = body if isinstance(body, dict) else {}  # a proxy in between may say anything
        if response.status != 200:
            raise Refused(f"the API server refuses: {said.get('message', response.status)}", status=response.status)
        if not isinstance(items := said.get("items"), list):
            raise Unavailable("what answers in place of the API server lists nothing: is the context's server right?")
        return items


@contextlib.asynccontextmanager
async def forward_api(credentials: Credentials) -> AsyncIterator[ForwardApi]:
    """Open a session with the API server as whoever the credentials are of."""
    context = ssl.create_default_context(cafile=credentials.ca_path)
    # Python 3.13 turned this on; the authorities of many clusters lack the key identifiers that it asks for.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if credentials.insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if credentials.certificate_path is not None:
        context.load_cert_chain(credentials.certificate_path, credentials.private_key_path)
    headers = {} if credentials.token is None else {"authorization": f"Bearer {credentials.token}"}
    connector = aiohttp.TCPConnector(ssl=context, limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers, proxy=credentials.proxy) as session:
        yield ForwardApi(session, credentials.server)


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod.get("status", {}).get("conditions", ())
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return ready and "deletionTimestamp" not in pod["metadata"]


async def _send(socket: aiohttp.ClientWebSocketResponse, reader: asyncio.StreamReader) -> None:
    """Send what a client says. One that has said all may wait for its answer: the pod then ends the connection."""
    try:
        while data := await reader.read(_READ_BYTES):
            await socket.send_bytes(bytes((_DATA,)) + data)
    except OSError:
        await socket.close()


async def _receive(socket: aiohttp.ClientWebSocketResponse, writer: asyncio.StreamWriter) -> None:
    greeted: set[int] = set()
    async for message in socket:
        if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel not in greeted:  # each begins with the port
            greeted.add(channel)
            data = data[_PORT_BYTES:]
        if channel == _ERROR and data:
            raise Unavailable(data.decode("utf-8", "replace").strip())
        if channel == _DATA and data:
            writer.write(data)
            await writer.drain()
