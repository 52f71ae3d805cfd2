"""Asks pods over HTTP: how far a download is, and what routers count. Whatever goes wrong, there is no answer.

Pods are not trusted: answers have a size limit, and what they say becomes numbers or nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

import aiohttp
import msgspec
from pagefleet_protocol.engine_facts import FACTS_PATH
from pagefleet_protocol.kube_names import SERVING_PORT
from pagefleet_protocol.model_facts import Progress

from pagefleet_operator.autoscale.fleet_numbers import parse_fleet_metrics
from pagefleet_operator.plan.kv_link import KvEngineSeen, read_kv_engine

TIMEOUT_S = 2.0
MAX_ANSWER_BYTES = 1 << 20
MAX_CONNECTIONS = 256
"""Pods that are dead keep theirs for TIMEOUT_S, in which the others are to be asked."""


class PodHttp(Protocol):
    """What pods are asked."""

    async def progress(self, ip: str) -> Progress | None:
        """Return how far the download of a model job is; None: it does not say."""

    async def fleet_metrics(self, ip: str) -> Mapping[str, float] | None:
        """Return what a router counts over its fleet, by metric name; None: it does not say."""

    async def router_page(self, ip: str) -> bytes | None:
        """Return a router's metrics in Prometheus' text format; None: it does not say."""

    async def kv_engine(self, name: str, ip: str) -> KvEngineSeen | None:
        """Return what an engine says of its K/V transfer; None: it does not say."""


class HttpPods:
    """Pods at their own addresses, on the port that all of ours serve on."""

    def __init__(self, port: int = SERVING_PORT) -> None:
        """Connect with the first request; close with `close`."""
        self._port = port
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS, force_close=True),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def progress(self, ip: str) -> Progress | None:
        """Return how far the download of a model job is; None: it does not say."""
        body = await self._get(ip, "/progress")
        try:
            return msgspec.json.decode(body, type=Progress) if body is not None else None
        except msgspec.DecodeError:
            return None

    async def fleet_metrics(self, ip: str) -> Mapping[str, float] | None:
        """Return what a router counts over its fleet, by metric name; None: it does not say."""
        body = await self._get(ip, "/metrics")
        return parse_fleet_metrics(body) if body is not None else None

    async def router_page(self, ip: str) -> bytes | None:
        """Return a router's metrics in Prometheus' text format; None: it does not say."""
        return await self._get(ip, "/metrics")

    async def kv_engine(self, name: str, ip: str) -> KvEngineSeen | None:
        """Return what an engine says of its K/V transfer; None: it does not say."""
        facts, metrics = await asyncio.gather(self._get(ip, FACTS_PATH), self._get(ip, "/metrics"))
        return read_kv_engine(name, facts, metrics)

    async def _get(self, ip: str, path: str) -> bytes | None:
        host = f"[{ip}]" if ":" in ip else ip
        try:
            async with self._session.get(f"http://{host}:{self._port}{path}", allow_redirects=False) as answer:
                if answer.status != 200:
                    return None
                body = await answer.content.read(MAX_ANSWER_BYTES + 1)
                while len(body) <= MAX_ANSWER_BYTES and not answer.content.at_eof():
                    body += await answer.content.read(MAX_ANSWER_BYTES + 1 - len(body))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
        return body if len(body) <= MAX_ANSWER_BYTES else None
