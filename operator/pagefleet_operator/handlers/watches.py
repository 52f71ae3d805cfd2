"""kopf's part: watches. Everything it sees goes into a `ClusterView`; it decides and writes nothing.

kopf is started through its embedding door, in our event loop, and started again when it ends: it gives up on errors of
the API server that last, and nothing here may. Switched off: peering, finalizers, annotations on our objects, events of
its own, cluster-wide scans for namespaces and definitions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import kopf
from pagefleet_protocol.kube_names import GROUP

from pagefleet_operator.apply.connection import Credentials
from pagefleet_operator.apply.kinds import Kind
from pagefleet_operator.handlers.audit import Scope
from pagefleet_operator.handlers.cluster_view import ClusterView, Key, managed_selector

_LOG = logging.getLogger(__name__)
_KOPF = Path(kopf.__file__).parent
PAGE_SIZE = 500
STOP_S = 10.0
MOST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Seconds."""

    server: int = 300
    """The API server ends a watch after so long; it is continued where it was."""
    inactivity: float = 90.0
    """A watch without an event or a bookmark (one a minute) for so long is broken, whatever TCP says."""
    reconnect: float = 1.0
    """Before a broken watch is opened again."""
    retry: float = 1.0
    """Before a request that failed is made again, the first time; it doubles up to `MOST_PAUSE_S`."""


class _Backoffs:
    """Pauses between attempts at one request, for ever: kopf ends with an error after the last."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s

    def __iter__(self) -> Iterator[float]:
        pause = self._first_s
        while True:
            yield pause
            pause = min(MOST_PAUSE_S, pause * 2)


class _NoDiffBase(kopf.DiffBaseStorage):
    """Remembers no last state, and above all does not copy every object to compare it with one."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> Any:
        return None

    def store(self, **_: Any) -> None:
        return None


class Watches:
    """Keeps a view up to date, and says which InferenceServices to look at."""

    def __init__(
        self,
        view: ClusterView,
        credentials: Callable[[], Credentials],
        wake: Callable[[Collection[Key]], None],
        times: WatchTimes = WatchTimes(),
    ) -> None:
        """`credentials` is asked again whenever the API server no longer takes the ones it has."""
        self._view = view
        self._credentials = credentials
        self._wake = wake
        self._times = times
        self._again = asyncio.Event()
        self._sessions: list[aiohttp.ClientSession] = []
        self.restarts = 0
        """How often kopf was started again."""

    def restart(self) -> None:
        """List and watch everything anew."""
        self._again.set()

    async def run(self, scope: Callable[[], Scope], started: Callable[[], None]) -> None:
        """Watch for ever. `scope` says what, at each start; `started` is called after kopf has taken over signals."""
        pauses = iter(_Backoffs(self._times.retry))
        while True:
            self._again.clear()
            began = asyncio.get_running_loop().time()
            await self._run_once(scope(), started)
            self.restarts += 1
            if asyncio.get_running_loop().time() - began > MOST_PAUSE_S:
                pauses = iter(_Backoffs(self._times.retry))
            await asyncio.sleep(next(pauses))

    async def _run_once(self, scope: Scope, started: Callable[[], None]) -> None:
        tasks: Collection[asyncio.Task[Any]] = ()
        again = asyncio.create_task(self._again.wait())
        try:
            tasks = await kopf.spawn_tasks(
                registry=self._registry(scope.kinds),
                settings=_settings(scope.kinds, self._times),
                standalone=True,
                clusterwide=not scope.namespaces,
                namespaces=tuple(scope.namespaces),
            )
            started()
            done, _ = await asyncio.wait((*tasks, again), return_when=asyncio.FIRST_COMPLETED)
            _report(done - {again})
        finally:
            # Not kopf.run_tasks: that would also cancel tasks of ours that were started after kopf's.
            again.cancel()
            await _end(tasks)
            for session in self._sessions:
                await session.close()
            self._sessions.clear()

    def _registry(self, kinds: Iterable[Kind]) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry, errors=kopf.ErrorsMode.TEMPORARY, backoff=5.0)
        async def login(**_: Any) -> kopf.AiohttpSession:
            session = self._session()
            self._sessions.append(session)
            return kopf.AiohttpSession(server=self._credentials().server, aiohttp_session=session)

        for kind in kinds:
            self._watch(registry, kind)
        return registry

    def _session(self) -> aiohttp.ClientSession:
        """Return connections that carry the token as it is now, and survive that it is refused for a while.

        A 401 would have kopf ask for other credentials, refuse the same ones for good, and end.
        """

        async def with_token(
            request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
        ) -> aiohttp.ClientResponse:
            if token := self._credentials().token:
                request.headers["Authorization"] = f"Bearer {token}"
            response = await handler(request)
            if response.status == 401:
                response.close()
                raise aiohttp.ClientConnectionError("the API server does not take our credentials (401)")
            return response

        credentials = self._credentials()
        tls = kopf.ConnectionInfo(
            server=credentials.server,
            ca_path=credentials.ca_path,
            insecure=credentials.insecure,
            certificate_path=credentials.certificate_path,
            private_key_path=credentials.private_key_path,
        )
        connector = aiohttp.TCPConnector(limit=0, ssl=tls.as_ssl_context())
        return aiohttp.ClientSession(connector=connector, proxy=credentials.proxy, middlewares=(with_token,))

    def _watch(self, registry: kopf.OperatorRegistry, kind: Kind) -> None:
        @kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=f"see-{kind.plural}")
        async def see(event: Any, **_: Any) -> None:
            keys = self._view.note(kind, event["object"], deleted=event["type"] == "DELETED")
            if keys:
                self._wake(keys)


def _settings(kinds: Iterable[Kind], times: WatchTimes) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.process.ultimate_exiting_timeout = None  # else kopf would kill this process 10 min after a restart of it
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.finalizer = f"{GROUP}/none"
    settings.persistence.diffbase_storage = _NoDiffBase()
    settings.watching.server_timeout = times.server
    settings.watching.inactivity_timeout = times.inactivity
    settings.watching.reconnect_backoff = times.reconnect
    settings.watching.chunk_size = PAGE_SIZE
    settings.networking.error_backoffs = _Backoffs(times.retry)
    settings.networking.request_timeout = 60.0
    settings.networking.connect_timeout = 5.0
    # A worker keeps its object in memory until it has been idle for so long.
    settings.queueing.idle_timeout = 0.05
    settings.queueing.exit_timeout = 1.0
    for kind in kinds:
        if selector := managed_selector(kind):
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector
    return settings


async def _end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """End kopf's tasks, and what they left: some start others while they end, and forget those."""
    deadline = asyncio.get_running_loop().time() + STOP_S
    while left := {*(one for one in tasks if not one.done()), *filter(_is_kopfs, asyncio.all_tasks())}:
        for task in left:
            task.cancel()
        if asyncio.get_running_loop().time() >= deadline:
            return
        await asyncio.wait(left, timeout=STOP_S / 10)


def _is_kopfs(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and Path(code.co_filename).is_relative_to(_KOPF)


def _report(done: Iterable[asyncio.Task[Any]]) -> None:
    for task in done:
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("the watches ended: %r; starting them again", error)
