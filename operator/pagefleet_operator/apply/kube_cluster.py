"""The cluster behind an API server: the official package's asynchronous dynamic client, one pool of connections.

The kinds are known (`kinds.py`), so nothing is discovered and nothing is cached on disk. Every request has a timeout,
every write takes a token and passes the fence, every failure becomes one of five errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import aiohttp
import msgspec
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic.client import DynamicClient
from kubernetes.aio.dynamic.resource import Resource
from pagefleet_protocol.kube_names import FIELD_MANAGER
from pagefleet_protocol.version import VERSION

from pagefleet_operator.apply.cluster import Body, Fence
from pagefleet_operator.apply.kinds import BY_NAME, EVENT, Kind
from pagefleet_operator.errors import ClusterError, Conflict, Refused, Throttled, Unavailable

ANNOTATOR = f"{FIELD_MANAGER}-facts"
"""Owner of annotations that an apply must leave alone."""
PAGE_SIZE = 500
MAX_EVENTS = 100
_METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
CONNECT_S = 5.0
MOST_REQUEST_S = 15.0
_TIMEOUT = aiohttp.ClientTimeout(total=MOST_REQUEST_S, connect=CONNECT_S)
_LIST_TIMEOUT = aiohttp.ClientTimeout(total=60.0, connect=CONNECT_S)
_DEFAULT_RETRY_AFTER_S = 1.0
_MOST_RETRY_AFTER_S = 300.0


class TokenBucket:
    """Lets `burst` requests through at once, and `rate_per_s` in the long run, in the order they came."""

    def __init__(
        self,
        rate_per_s: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst)
        self._clock = clock
        self._sleep = sleep
        self._tokens = float(burst)
        self._filled_at = clock()

    async def take(self) -> None:
        """Take one token; wait until there is one."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._filled_at) * self._rate_per_s)
        self._filled_at = now
        # Going below zero books a place in the queue: whoever comes next waits longer.
        self._tokens -= 1.0
        if self._tokens < 0:
            await self._sleep(-self._tokens / self._rate_per_s)


class RequestObserver(Protocol):
    """Counts requests."""

    def request_done(self, verb: str, kind: str, status: int, seconds: float) -> None:
        """One request ended; `status` is 0 where there was no answer."""


def connect(configuration: Configuration) -> ApiClient:
    """Return the pool of connections that everything shares; it connects with the first request. Close it."""
    client = ApiClient(configuration)
    client.user_agent = f"pagefleet-operator/{VERSION}"
    return client


class KubeCluster:
    """A `Cluster` over HTTP."""

    def __init__(self, client: ApiClient, fence: Fence, writes: TokenBucket, observer: RequestObserver) -> None:
        """Writes take a token of `writes` each."""
        self._dynamic = DynamicClient(client)
        self._resources = {kind: _resource(self._dynamic, kind) for kind in BY_NAME.values()}
        self._fence = fence
        self._writes = writes
        self._observer = observer

    async def get(self, kind: Kind, namespace: str, name: str) -> Body | None:
        with self._request("get", kind), _missing() as found:
            found.append(await self._resources[kind].get(name=name, namespace=namespace or None, **_call()))
        return found[0] if found else None

    async def apply(self, body: Mapping[str, Any]) -> Body:
        kind = BY_NAME[body["kind"]]
        timeout = await self._may_write()
        with self._request("apply", kind):
            applied: Body = await self._resources[kind].server_side_apply(
                body=dict(body),
                namespace=body["metadata"].get("namespace"),
                field_manager=FIELD_MANAGER,
                force_conflicts=True,
                **_call(timeout),
            )
        return applied

    async def annotate(self, kind: Kind, namespace: str, name: str, annotations: Mapping[str, str]) -> None:
        await self._merge(kind, namespace, name, {"metadata": {"annotations": dict(annotations)}}, "", ANNOTATOR)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
        }
        timeout = await self._may_write()
        with contextlib.suppress(Conflict), self._request("delete", kind), _missing():
            await self._resources[kind].delete(name=name, namespace=namespace, body=options, **_call(timeout))

    async def patch_status(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> None:
        await self._merge(kind, namespace, name, {"status": dict(patch)}, "/status", FIELD_MANAGER)

    async def create(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Body:
        return await self._put("create", kind, namespace, body)

    async def replace(self, kind: Kind, namespace: str, body: Mapping[str, Any]) -> Body:
        return await self._put("replace", kind, namespace, body)

    async def list_events(self, namespace: str, kind: str, name: str) -> Sequence[Body]:
        selector = f"involvedObject.kind={kind}" + (f",involvedObject.name={name}" if name else "")
        with self._request("list", EVENT):
            answer = await self._resources[EVENT].get(
                namespace=namespace, field_selector=selector, limit=MAX_EVENTS, **_call()
            )
        return list(answer.get("items") or ())

    async def list_metadata(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[Body]:
        resume = None
        while True:
            with self._request("list", kind):
                page = await self._resources[kind].get(
                    namespace=namespace or None,
                    label_selector=selector or None,
                    limit=PAGE_SIZE,
                    _continue=resume,
                    header_params={"Accept": _METADATA_LIST},
                    **_call(_LIST_TIMEOUT),
                )
            for item in page.get("items") or ():
                yield item["metadata"]
            resume = page.get("metadata", {}).get("continue")
            if not resume:
                return

    async def kinds_present(self, kinds: Sequence[Kind]) -> frozenset[str]:
        served: dict[str, frozenset[str]] = {}
        for kind in kinds:
            if kind.root in served:
                continue
            with self._request("discover", kind), _missing() as found:
                found.append(await self._dynamic.request("get", kind.root, **_call()))
            resources = found[0].get("resources", ()) if found else ()
            served[kind.root] = frozenset(one["kind"] for one in resources)
        return frozenset(kind.kind for kind in kinds if kind.kind in served[kind.root])

    async def _put(
        self, verb: Literal["create", "replace"], kind: Kind, namespace: str, body: Mapping[str, Any]
    ) -> Body:
        timeout, put = await self._may_write(), getattr(self._resources[kind], verb)
        with self._request(verb, kind):
            answer: Body = await put(
                body=dict(body), namespace=namespace, field_manager=FIELD_MANAGER, **_call(timeout)
            )
        return answer

    async def _merge(
        self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any], below: str, manager: str
    ) -> None:
        timeout = await self._may_write()
        path = self._resources[kind].path(name=name, namespace=namespace) + below
        with self._request("patch", kind):
            await self._dynamic.request(
                "patch",
                path,
                body=patch,
                content_type="application/merge-patch+json",
                field_manager=manager,
                **_call(timeout),
            )

    async def _may_write(self) -> aiohttp.ClientTimeout:
        self._fence.check()
        await self._writes.take()
        seconds = self._fence.check()  # time has passed
        return aiohttp.ClientTimeout(total=min(seconds, MOST_REQUEST_S), connect=CONNECT_S)

    @contextlib.contextmanager
    def _request(self, verb: str, kind: Kind) -> Iterator[None]:
        started, status = time.monotonic(), 200
        try:
            yield
        except ApiException as failure:
            error = cluster_error(failure)
            status = error.status
            raise error from failure
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as failure:
            # ValueError: an answer that is not JSON, from something that stands before the API server.
            status = 0
            raise Unavailable(f"{verb} {kind.kind}: {str(failure) or type(failure).__name__}") from failure
        except asyncio.CancelledError:
            status = 0
            raise
        finally:
            self._observer.request_done(verb, kind.kind, status, time.monotonic() - started)


def cluster_error(failure: ApiException) -> ClusterError:
    status = int(failure.status or 0)
    details = _status_object(failure.body)
    message = str(details.get("message") or failure.reason or f"HTTP {status}")
    reason = str(details.get("reason") or failure.reason or "")
    if status == 429:
        return Throttled(message, retry_after_s=_retry_after(failure.headers, details))
    if status == 409:
        return Conflict(message, status=status, reason=reason)
    if 400 <= status < 500:
        return Refused(message, status=status, reason=reason)
    return Unavailable(message, status=status, reason=reason)


def _status_object(body: object) -> Mapping[str, Any]:
    if not isinstance(body, str | bytes):
        return {}
    try:
        parsed = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _retry_after(headers: Mapping[str, str] | None, details: Mapping[str, Any]) -> float:
    text = str((headers or {}).get("Retry-After") or (details.get("details") or {}).get("retryAfterSeconds") or "")
    try:
        return min(max(float(text), 0.0), _MOST_RETRY_AFTER_S)
    except ValueError:
        return _DEFAULT_RETRY_AFTER_S


@contextlib.contextmanager
def _missing() -> Iterator[list[Body]]:
    """Give a list for what is found; 404 leaves it empty."""
    found: list[Body] = []
    try:
        yield found
    except ApiException as failure:
        if failure.status != 404:
            raise


def _call(timeout: aiohttp.ClientTimeout = _TIMEOUT) -> dict[str, Any]:
    """Return what every request says: its timeout, and that answers stay plain dicts."""
    return {"_request_timeout": timeout, "serializer": _plain}


def _plain(_: DynamicClient, answer: Body) -> Body:
    return answer


def _resource(client: DynamicClient, kind: Kind) -> Resource:
    return Resource(
        prefix="apis" if kind.group else "api",
        group=kind.group,
        api_version=kind.version,
        kind=kind.kind,
        namespaced=kind.namespaced,
        name=kind.plural,
        client=client,
    )
