"""Clients of the emulated API server, as the operator has them. No test in here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kopf
from kubernetes.aio import client, dynamic

from tests.fakes.kube_api import KubeApi


@contextlib.asynccontextmanager
async def dynamic_client(api: KubeApi, cache: Path) -> AsyncIterator[Any]:
    """Yield kubernetes.aio's dynamic client; `cache` is a file of its own, else runs would share one in /tmp."""
    configuration = client.Configuration(host=api.address)
    async with client.ApiClient(configuration) as connection:
        yield await dynamic.DynamicClient(connection, cache_file=str(cache))


@contextlib.asynccontextmanager
async def kopf_operator(
    api: KubeApi, registry: kopf.OperatorRegistry, namespace: str = "default"
) -> AsyncIterator[None]:
    """Run the handlers of a registry against the server until the block ends."""

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=api.address)

    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.networking.error_backoffs = [0.02, 0.05]
    settings.watching.reconnect_backoff = 0.02
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix="pagefleet.dev")
    ready, stop = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(
        kopf.operator(
            registry=registry,
            settings=settings,
            standalone=True,
            namespaces=[namespace],
            ready_flag=ready,
            stop_flag=stop,
        )
    )
    try:
        await asyncio.wait_for(ready.wait(), 120)
        yield
    finally:
        stop.set()
        await asyncio.wait_for(running, 120)
