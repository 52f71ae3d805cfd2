"""Follows a Service's EndpointSlices: list, watch, and begin again whatever happens.

The engines found last stay in force while the API server is away: serving does not need it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from pagefleet_protocol.endpoints import Endpoint

from pagefleet_router.discovery.endpoint_slices import engines_of
from pagefleet_router.discovery.slice_api import ApiAccess, ApiServerError, SliceApi, read_inference_service
from pagefleet_router.discovery.slice_cache import SliceCache
from pagefleet_router.discovery.source import EndpointSink
from pagefleet_router.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchTiming:
    """Seconds."""

    watch: float = 300.0
    """How long one watch may last; the server ends it then."""
    silence: float = 90.0
    """A watch without a byte for so long is dead: the server sends a bookmark each minute."""
    least: float = 1.0
    """From the beginning of one attempt to the next, whatever becomes of it."""
    longest: float = 30.0
    """Between attempts that fail in a row."""


def pause_s(num_failures: int, retry_after_s: float, lasted_s: float, chance: float, timing: WatchTiming) -> float:
    """Return how long to wait before the next attempt: exponentially longer, at random within a factor of two.

    Args:
        num_failures: in a row; 0 after a watch that ended as it should.
        retry_after_s: what the server asked for.
        lasted_s: how long the last attempt took.
        chance: 0 to 1.
        timing: the bounds.
    """
    longest = min(timing.longest, timing.least * 2 ** min(num_failures, 30)) if num_failures else 0.0
    return max(longest * (1 + chance) / 2, retry_after_s, timing.least - lasted_s)


@dataclass(frozen=True, slots=True)
class ServiceRef:
    """Whose pods are the engines, and what they serve."""

    namespace: str
    service: str
    model: str


class KubernetesSource:
    """A source of endpoints.

    Args:
        access: the API server.
        target: the Service.
        timing: how it is watched.
        clock: monotonic seconds.
    """

    def __init__(
        self, access: ApiAccess, target: ServiceRef, timing: WatchTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._access = access
        self._target = target
        self._timing = timing or WatchTiming()
        self._clock = clock
        self._random = random.Random()  # noqa: S311 - spreads load, guards nothing
        self._cache = SliceCache()
        self._reported: tuple[Endpoint, ...] | None = None
        self._num_failures = 0
        self._complaint = ""

    async def run(self, sink: EndpointSink) -> None:
        """Report until cancelled."""
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
            api = SliceApi(session, self._access, self._target.namespace, self._target.service)
            while True:
                began, retry_after = self._clock(), 0.0
                try:
                    await self._follow(api, sink)
                    self._num_failures = 0
                except ApiServerError as error:
                    self._failed(error, sink)
                    retry_after = error.retry_after_s
                lasted, chance = self._clock() - began, self._random.random()
                await asyncio.sleep(pause_s(self._num_failures, retry_after, lasted, chance, self._timing))

    async def _follow(self, api: SliceApi, sink: EndpointSink) -> None:
        """List if that is needed, then report events until the watch ends."""
        cache, timing = self._cache, self._timing
        if cache.version is None:
            cache.replace(await api.list())
            self._report(sink)
        assert cache.version is not None
        length = timing.watch * self._random.uniform(0.8, 1.0)
        async with api.watch(cache.version, length, timing.silence) as lines:
            self._answers_again()
            async for line in lines:
                cache.apply(line)
                self._num_failures = 0
                self._report(sink)

    def _report(self, sink: EndpointSink) -> None:
        found = engines_of(self._cache.slices.values(), self._target.model)
        if found != self._reported:
            self._reported = found
            sink.replace(found)

    def _failed(self, error: ApiServerError, sink: EndpointSink) -> None:
        self._num_failures += 1
        if error.relist:
            self._cache.version = None
        reason = str(error)
        sink.explain(reason)
        if reason != self._complaint:
            self._complaint = reason
            known = "no engine is known yet" if self._reported is None else "the last list of engines stays in force"
            logger.warning("%s; %s", reason, known)

    def _answers_again(self) -> None:
        if self._complaint:
            self._complaint = ""
            logger.info("the Kubernetes API server answers again")


SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


def make_kubernetes_source(
    service: str, namespace: str | None, model: str, environment: Mapping[str, str] = os.environ,
    folder: Path = SERVICE_ACCOUNT,
) -> KubernetesSource:  # fmt: skip
    """Return the source of a Service's pods.

    Args:
        service: its name.
        namespace: None: the pod's own.
        model: what its pods serve.
        environment: the process's.
        folder: token, ca.crt and namespace of the service account.

    Raises:
        ConfigError: this is no pod, or it has no service account's token.
    """
    access = in_cluster_access(environment, folder)
    return KubernetesSource(access, ServiceRef(namespace or own_namespace(folder), service, model))


def own_namespace(folder: Path) -> str:
    """Return the pod's namespace.

    Raises:
        ConfigError: the service account's folder does not say it.
    """
    try:
        return (folder / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"{folder / 'namespace'} cannot be read: give --kubernetes-namespace NAME") from None


def make_service_asker(
    name: str, namespace: str | None, environment: Mapping[str, str] = os.environ, folder: Path = SERVICE_ACCOUNT
) -> Callable[[], Awaitable[bytes]]:
    """Return what reads the InferenceService of that name as JSON.

    Raises:
        ConfigError: this is no pod, or it has no service account's token.
    """
    access = in_cluster_access(environment, folder)
    where = namespace or own_namespace(folder)
    return lambda: read_inference_service(access, where, name)


def in_cluster_access(environment: Mapping[str, str], folder: Path) -> ApiAccess:
    """Return where the API server is and what the service account's folder holds for it.

    Raises:
        ConfigError: a variable or a file is missing.
    """
    host, port = (environment.get(f"KUBERNETES_SERVICE_{what}", "") for what in ("HOST", "PORT"))
    if not host or not port.isdecimal():
        raise ConfigError(
            "--kubernetes-service works in a pod, and KUBERNETES_SERVICE_HOST and _PORT are not set here: "
            "give --endpoints-file FILE or --engine URL"
        )
    token, authority = folder / "token", folder / "ca.crt"
    for file in (token, authority):
        if not os.access(file, os.R_OK):
            raise ConfigError(f"{file} cannot be read: the pod needs automountServiceAccountToken: true")
    return ApiAccess(f"https://{_bracketed(host)}:{port}", token, authority)


def _bracketed(host: str) -> str:
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host
