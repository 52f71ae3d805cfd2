"""Requests to the Kubernetes API server: list the EndpointSlices of a Service, watch them, read an InferenceService.

Token and certificate authority are read for every request: a kubelet replaces both while the pod runs.
"""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from pagefleet_protocol.kube_names import API_VERSION, PLURAL
from pagefleet_protocol.version import VERSION

from pagefleet_router.errors import RouterError

_MAX_LIST_BYTES = 64 * 2**20
_MAX_LINE_BYTES = 16 * 2**20
_CONNECT_S = 5.0
_LIST_S = 30.0
_LONGEST_RETRY_AFTER_S = 120.0
_VERBS = {"endpointslices": "list and watch"}


class ApiServerError(RouterError):
    """The API server gave no usable answer. The message is for logs and probes, and names no address.

    Args:
        reason: what happened.
        relist: whether what is known must be listed anew before it is watched again.
        retry_after_s: what the server asked to wait.
    """

    def __init__(self, reason: str, *, relist: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.relist = relist
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Where the API server is, and with what one comes."""

    url: str
    token_file: Path | None
    ca_file: Path | None


@dataclass(frozen=True, slots=True)
class SliceApi:
    """Asks for the slices of one Service.

    Args:
        session: not closed here.
        access: the API server.
        namespace: of the Service.
        service: its name.
    """

    session: aiohttp.ClientSession
    access: ApiAccess
    namespace: str
    service: str

    async def list(self) -> bytes:
        """Return the answer's body.

        Raises:
            ApiServerError: there is none.
        """
        async with self._get({}, aiohttp.ClientTimeout(total=_LIST_S, connect=_CONNECT_S)) as response:
            return await _whole(response)

    @contextlib.asynccontextmanager
    async def watch(self, version: str, length_s: float, silence_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Begin a watch; yields its lines, one JSON object each. They end when the server ends them or is silent.

        Args:
            version: the resource version to go on from.
            length_s: how long the server shall keep it up.
            silence_s: without a byte for so long the connection counts as dead; there is a bookmark each minute.

        Raises:
            ApiServerError: it was refused, or the connection broke.
        """
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(max(1, round(length_s))),
        }
        limits = aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_read=silence_s)
        async with self._get(params, limits) as response, contextlib.aclosing(_lines(response.content)) as lines:
            yield lines

    @contextlib.asynccontextmanager
    async def _get(
        self, params: Mapping[str, str], limits: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"
        asked = {"labelSelector": f"kubernetes.io/service-name={self.service}", **params}
        async with _answer(self.session, self.access, path, asked, limits) as response:
            yield response


async def read_inference_service(access: ApiAccess, namespace: str, name: str) -> bytes:
    """Return the object as JSON.

    Raises:
        ApiServerError: there is no answer, or not that one.
    """
    path = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}/{name}"
    limits = aiohttp.ClientTimeout(total=_CONNECT_S)
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar()) as session,
        _answer(session, access, path, {}, limits) as response,
    ):
        return await _whole(response)


@contextlib.asynccontextmanager
async def _answer(
    session: aiohttp.ClientSession, access: ApiAccess, path: str, params: Mapping[str, str],
    limits: aiohttp.ClientTimeout,
) -> AsyncIterator[aiohttp.ClientResponse]:  # fmt: skip
    trust, headers = _credentials(access)
    url = f"{access.url}{path}"
    request = session.get(url, params=params, headers=headers, ssl=trust, timeout=limits, allow_redirects=False)
    try:
        async with request as response:
            if response.status != 200:
                raise _refusal(response, path.split("/")[-1 if path.endswith("slices") else -2])
            yield response
    except (aiohttp.ClientError, OSError) as error:
        raise ApiServerError(f"the Kubernetes API server cannot be reached ({_reason(error)})") from error


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > _MAX_LIST_BYTES:
            raise ApiServerError("the Kubernetes API server's list is too long")
    return bytes(body)


async def _lines(content: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    rest = b""
    while True:
        try:
            part = await content.readany()
        except TimeoutError:
            return
        *lines, rest = (rest + part).split(b"\n")
        for line in filter(None, lines):
            yield line
        if not part:
            return
        if len(rest) > _MAX_LINE_BYTES:
            raise ApiServerError("the Kubernetes API server sent an event that is too long", relist=True)


def _credentials(access: ApiAccess) -> tuple[ssl.SSLContext | bool, dict[str, str]]:
    headers = {"accept": "application/json", "user-agent": f"pagefleet-router/{VERSION}"}
    try:
        trust = _trust(access.ca_file) if access.ca_file is not None else True
        if access.token_file is not None:
            token = access.token_file.read_text(encoding="ascii").strip()
            if not token or not token.isprintable():
                raise ValueError("no token")
            headers["authorization"] = f"Bearer {token}"
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        raise ApiServerError(f"the service account's token or certificate cannot be read ({reason})") from error
    return trust, headers


def _trust(ca_file: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca_file)
    # Python 3.13 turned this on; the authorities of many clusters lack the key identifiers that it asks for.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _refusal(response: aiohttp.ClientResponse, resource: str) -> ApiServerError:
    status = response.status
    hint = {
        401: "401: it does not accept the service account's token",
        403: f"403: the service account may not {_VERBS.get(resource, 'get')} {resource}; give it a Role",
        410: "410: the list is too old",
        429: "429: it has too many requests",
    }.get(status, str(status))
    given = response.headers.get("retry-after", "")
    retry_after = min(float(given), _LONGEST_RETRY_AFTER_S) if given.isdecimal() else 0.0
    return ApiServerError(f"the Kubernetes API server answers {hint}", relist=True, retry_after_s=retry_after)


def _reason(error: Exception) -> str:
    """Say what is wrong without the address, which is in the texts of aiohttp."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientPayloadError | aiohttp.ServerDisconnectedError):
        return "the connection broke"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return type(error).__name__
