"""Puts the router together and runs it: listen, watch the clock, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any

from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.fault_book import FaultBook
from pagefleet_protocol.fleet_key import FleetKey, FleetKeyError, read_fleet_key
from pagefleet_protocol.trace_collector import TracesError, make_tracer
from pagefleet_protocol.tracing import Tracer
from pagefleet_protocol.version import VERSION
from pagefleet_protocol.workers.siblings import CONSOLE, FIGURES, Siblings

from pagefleet_router.admission.gate import Gate, GateLimits, collect_admission
from pagefleet_router.admission.room import FleetRooms
from pagefleet_router.config import RouterConfig
from pagefleet_router.console.assembly import Notes, RouterParts, make_board, make_browsers
from pagefleet_router.console.board import Board
from pagefleet_router.discovery.source import EndpointSource, FileSource, StaticSource
from pagefleet_router.engines.endpoints import EndpointTable, EngineView
from pagefleet_router.errors import ConfigError, shutting_down
from pagefleet_router.events.fleet_caches import FleetCaches
from pagefleet_router.exchange.dispatcher import Dispatcher
from pagefleet_router.exchange.forwarding import Transfers
from pagefleet_router.exchange.front import FrontDoor, FrontLimits, Notebooks, Visitors
from pagefleet_router.exchange.services import Services
from pagefleet_router.exchange.tracing import RequestTraces
from pagefleet_router.prefix.knowledge import PrefixKnowledge
from pagefleet_router.scheduling.outliers import OutlierDetector
from pagefleet_router.scheduling.pairing import Pairing
from pagefleet_router.scheduling.policies import make_policy
from pagefleet_router.scheduling.policy import Policy
from pagefleet_router.scheduling.retry_budget import RetryBudget
from pagefleet_router.signals.monitor import Monitor, MonitorTiming
from pagefleet_router.telemetry.access_log import AccessLog
from pagefleet_router.telemetry.line_writer import LineWriter, log_without_waiting
from pagefleet_router.telemetry.log import tell_of_a_crash
from pagefleet_router.telemetry.metrics import RouterMetrics
from pagefleet_router.tokens.prompt_reader import PlainPrompts, PromptReader
from pagefleet_router.tokens.tokenized_prompts import TokenizedPrompts
from pagefleet_router.wire.access import ApiKeys
from pagefleet_router.wire.client_connection import ClientConnection, ConnectionRules, ConnectionTiming
from pagefleet_router.wire.memory import BodyMemory, SpareMemory, keep_bodies
from pagefleet_router.wire.pool import UpstreamPools
from pagefleet_router.workers.figures import WorkersFigures
from pagefleet_router.workers.seat import BACKLOG, Seat

if TYPE_CHECKING:
    from pagefleet_router.picker.server import PickerServer

logger = logging.getLogger(__name__)

_TICK_S = 0.25
_DRAIN_POLL_S = 0.05
_LAST_ANSWERS_S = 1.0
"""For clients that send one request after the other: each answer tells them to connect anew."""
_SWITCH_S = 0.0005
"""For which a thread that reads a prompt may keep the interpreter from the event loop; a tenth of the default."""
_FIRST_ENGINE_S = 3.0
_MAX_BODIES_BYTES = 512 * 2**20
"""Bodies of all requests, while they are read, wait or are answered; shared out as the next one is."""
_MAX_WAITING_BYTES = 256 * 2**20
"""Bodies of waiting requests, over all processes; a process may hold one body of the largest size in any case."""


class Router:
    """One router in one event loop.

    Args:
        config: the settings.
        timing: limits for client connections.
        monitor_timing: how engines are watched.
        source: where engines are listed; None: what the settings name.
        seat: this worker's place among several; None: it is alone.
        rng: for ties and samples; None: one that no other router has.

    Raises:
        ConfigError: what the settings name cannot be used here.
    """

    def __init__(
        self, config: RouterConfig, timing: ConnectionTiming | None = None, monitor_timing: MonitorTiming | None = None,
        source: EndpointSource | None = None, seat: Seat | None = None, rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        self.config = config
        self._rng = rng or random.Random()  # noqa: S311 - guards nothing
        self._seat = seat
        self._is_keyless_told = False
        self._source = source or make_source(config)
        self.table = make_table(config)
        self.connections: set[ClientConnection] = set()
        self.broken = asyncio.Event()
        """Set when what no router can do without has crashed: the look at deadlines, or at the list of engines."""
        self._spare_memory = SpareMemory()
        self.budget = RetryBudget()
        notes = Notes() if config.console else None
        faults = None if notes is None else notes.faults
        self._monitor = Monitor(self.table, self._on_healthy, monitor_timing, faults)
        self.metrics = RouterMetrics(
            lambda: self.table.snapshot, lambda: self.budget.live_requests, lambda: self._monitor.generated.total
        )
        self._siblings = None if seat is None else self._make_siblings(seat)
        self.pools = UpstreamPools(config.connect_timeout, time.monotonic)
        timing = timing or ConnectionTiming()
        memory = BodyMemory(max(config.max_body_bytes, _MAX_BODIES_BYTES // config.workers))
        self._rules = ConnectionRules(config.max_body_bytes, config.max_connections, memory, timing)
        key = read_key(config)
        self._caches = FleetCaches(config, self.table, key)
        self._prompts: PromptReader = TokenizedPrompts(self.table) if config.kv_events else PlainPrompts()
        self.metrics.include(self._caches.collect, self._prompts.collect)
        transfers = None if key is None else Transfers(key, config.pd_fallback)
        self._dispatcher = self._make_dispatcher(has_transfers=transfers is not None, faults=faults)
        self.table.subscribe(self._follow)
        self.table.subscribe_to_facts(self._facts_changed)
        self._access = LineWriter(sys.stdout.fileno()) if config.access_log else None
        self._log = None if self._access is None else AccessLog(self._access)
        keys = ApiKeys(config.api_key_file) if config.api_key_file else None
        self.gate = make_gate(config, self.table, keys, faults)
        self.table.watch(self.gate.engines_changed)
        self.metrics.include(lambda: collect_admission(self.gate))
        self._tracer = make_router_tracer(config)
        traces = RequestTraces(self._tracer, config.policy)
        self.metrics.include(traces.collect)
        services = Services(
            self._dispatcher, self.pools, self.gate, self._prompts, config.first_byte_timeout, config.gap_timeout,
            timing.hold, bool(config.cold_start_timeout), config.explain, traces=traces, transfers=transfers,
        )  # fmt: skip
        parts = RouterParts(
            self.table, self._monitor, self.gate, self.metrics, self.connections, self._siblings,
            lambda: () if self.gateways is None else self.gateways.tenants_inside(),
        )  # fmt: skip
        self._board: Board | None = make_board(config, notes, parts)
        self.front = FrontDoor(
            self.table, services, self.metrics,
            FrontLimits(config.max_concurrent, bool(config.cold_start_timeout), config.session_header.encode()),
            Visitors(make_browsers(config, self._board), keys),
            Notebooks(self._log, None if notes is None else notes.recent),
        )  # fmt: skip
        self.gateways = make_gateways(config, self.front, services, memory)
        """Answers gateways; None: the settings want no endpoint picker."""

    def _make_siblings(self, seat: Seat) -> Siblings:
        answers = {FIGURES: self.metrics.text, CONSOLE: lambda: self._board.own_part() if self._board else b""}
        siblings = Siblings(seat.folder, seat.index, seat.num_workers, answers)
        figures = WorkersFigures(self.metrics.text, siblings)
        self.metrics.gather = figures.gather
        self.metrics.include(figures.collect)
        return siblings

    def _make_dispatcher(self, *, has_transfers: bool, faults: FaultBook | None) -> Dispatcher:
        config, knowledge = self.config, self._caches.knowledge
        policy = make_policy(config.policy, knowledge, time.monotonic, self._rng)
        pairing = make_pairing(config, policy, knowledge, self._rng) if has_transfers else None
        return Dispatcher(
            self.table, policy, self.budget, OutlierDetector(), self.metrics, time.monotonic,
            self._monitor.mark_refused, pairing, faults,
        )  # fmt: skip

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[int]:
        """Listen and follow the engines; yields the port.

        Raises:
            ConfigError: the address cannot be had.
        """
        loop = asyncio.get_running_loop()
        if self._siblings is not None:
            await self._siblings.start()
        tasks = [loop.create_task(self._source.run(self.table)), loop.create_task(self._tick())]
        for task in tasks:
            tell_of_a_crash(task, "a task of the router ended: it drains and ends too", self.broken.set)
        server: asyncio.Server | None = None
        try:
            server = await self._listen(loop)
            if self.gateways is not None and self.config.endpoint_picker_port is not None:
                await self.gateways.start(self.config.host, self.config.endpoint_picker_port)
            yield server.sockets[0].getsockname()[1]
        finally:
            if server is not None:
                server.close()
            if self.gateways is not None:
                await self.gateways.stop(0.0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._monitor.stop()
            await self._caches.stop()
            await self._prompts.stop()
            if self._siblings is not None:
                await self._siblings.stop()
            for connection in list(self.connections):
                connection.close_now()
            self.pools.keep_only(set())
            if self._log is not None and self._access is not None:
                self._log.flush()
                await asyncio.to_thread(self._access.close)
            await asyncio.to_thread(self._tracer.close)

    async def drain(self) -> None:
        """Answer what comes for a moment more, then take nothing new and wait for what runs, up to `drain_timeout`.

        A client that has just sent its next request would find its connection closed, and could not know whether to
        send it again. What is left in the end is ended with an error.
        """
        started = time.monotonic()
        deadline = started + self.config.drain_timeout
        self.front.leaving = True
        last = min(deadline, started + _LAST_ANSWERS_S)
        while (self.connections or self.gateways is not None) and time.monotonic() < last:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)  # gateways still ask until they have seen that this router is not ready
        self.front.draining = True
        logger.info("taking nothing new")
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.gateways is not None:
            await self.gateways.stop(max(0.0, deadline - time.monotonic()))
        while self.budget.live_requests and time.monotonic() < deadline:  # noqa: ASYNC110 - no event per request
            await asyncio.sleep(_DRAIN_POLL_S)
        left = [connection.responder for connection in self.connections if connection.responder is not None]
        for responder in left:
            responder.cut(shutting_down())
        if left:
            logger.warning("%d requests were cut: the drain timeout is over", len(left))
            await asyncio.sleep(_DRAIN_POLL_S)  # let the last bytes leave

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        if self._seat is not None:
            if self._seat.is_replacement:
                await self._until_an_engine_is_usable()
            return await loop.create_server(self._connection, sock=self._seat.listener)
        host, port = self.config.host, self.config.port
        try:
            return await loop.create_server(self._connection, host, port, backlog=BACKLOG)
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be listened on ({error.strerror}): give another --port") from error

    async def _until_an_engine_is_usable(self) -> None:
        """Wait, for a while: who connects here could as well have been served by another worker."""
        deadline = time.monotonic() + _FIRST_ENGINE_S
        while not any(self.table.snapshot.usable.values()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)

    def _connection(self) -> ClientConnection:
        return ClientConnection(self.front, self.connections, self._rules, time.monotonic)

    def _follow(self, left: set[str], came: set[str]) -> None:
        for engine_id in left:
            self._dispatcher.forget(engine_id)
        # An address may have passed from one engine to another: connections to the old one lead nowhere.
        self.pools.keep_only({one.endpoint.url for one in self.table.snapshot.engines if one.id not in came})
        logger.info("engines: %d (%d new, %d gone)", len(self.table.snapshot.engines), len(came), len(left))

    def _facts_changed(self, engine: EngineView, before: EngineFacts | None) -> None:
        if engine.role != "both" and self._dispatcher.pairing is None and not self._is_keyless_told:
            self._is_keyless_told = True
            logger.warning(
                "engine %s is for %s alone, but nobody is sent there with another engine: give --fleet-key-file",
                engine.id, engine.role,
            )  # fmt: skip

    def _on_healthy(self, engine_id: str) -> None:
        self._dispatcher.healthy(engine_id)

    async def _tick(self) -> None:
        """Look at all deadlines together: cheaper than a timer per request."""
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            self.metrics.num_connections = len(self.connections)
            self._spare_memory.check(len(self.connections))
            for connection in list(self.connections):
                connection.check(now)
            self.gate.check(now)
            if self._board is not None:
                self._board.tick(now)
            if self._seat is not None:
                self._seat.beat(now)
            self._caches.tick(now)
            self.pools.drop_stale(now)
            if self._log is not None and self._access is not None:
                self._log.flush()
                self.metrics.access_lines_dropped = self._access.num_dropped


def make_source(config: RouterConfig) -> EndpointSource:
    """Return the source of engines that the settings name.

    Raises:
        ConfigError: Kubernetes is asked for outside a pod.
    """
    if config.endpoints_file is not None:
        return FileSource(config.endpoints_file)
    assert config.model_name is not None
    if config.kubernetes_service is None:
        return StaticSource(config.engine, config.model_name)
    # Its HTTP client takes 0.1 s and 10 MB, which other sources need not pay.
    from pagefleet_router.discovery.kubernetes import make_kubernetes_source  # noqa: PLC0415

    return make_kubernetes_source(config.kubernetes_service, config.kubernetes_namespace, config.model_name)


def make_gateways(
    config: RouterConfig, front: FrontDoor, services: Services, memory: BodyMemory
) -> PickerServer | None:  # fmt: skip
    """Return what answers gateways, if the settings ask for it.

    Raises:
        ConfigError: the packages for that are not installed.
    """
    if config.endpoint_picker_port is None:
        return None
    # gRPC takes 20 MB and threads of its own, which other routers need not pay.
    try:
        from pagefleet_router.picker.server import Picker, PickerServer  # noqa: PLC0415
    except ImportError as error:
        message = f"endpoint_picker_port needs more packages ({error}): pip install 'pagefleet-router[picker]'"
        raise ConfigError(message) from None
    picker = Picker(front, services, memory, config.max_body_bytes)
    services.dispatcher.metrics.include(picker.picks.collect)
    return PickerServer(picker, tls=config.endpoint_picker_tls, shared=config.workers > 1)


def make_router_tracer(config: RouterConfig) -> Tracer:
    """Return what sends this process's spans to where the settings say.

    Raises:
        ConfigError: the packages for that are not installed.
    """
    resource = {"service.name": "pagefleet-router", "service.version": VERSION, "service.instance.id": uuid.uuid4().hex}
    try:
        return make_tracer(config.otlp_traces_endpoint, config.otlp_traces_sample, resource, logger)
    except TracesError as error:
        raise ConfigError(f"otlp_traces_endpoint {error}") from None


def read_key(config: RouterConfig) -> FleetKey | None:
    """Return the fleet key, for KV events and transfers; None: the settings name none.

    Raises:
        ConfigError: the fleet key cannot be read.
    """
    if config.fleet_key_file is None:
        return None
    try:
        return read_fleet_key(config.fleet_key_file)
    except FleetKeyError as error:
        raise ConfigError(f"fleet_key_file {config.fleet_key_file} {error}") from None


def make_pairing(config: RouterConfig, policy: Policy, knowledge: PrefixKnowledge, rng: random.Random) -> Pairing:
    """Return what chooses between one engine and two."""
    return Pairing(policy, knowledge, config.pd_threshold, config.policy == "auto", time.monotonic, rng)


def make_table(config: RouterConfig) -> EndpointTable:
    """Return the table for the settings: where requests may wait for engines, models do not leave with them."""
    named = (config.model_name,) if config.model_name is not None else ()
    aliases = {alias: config.model_name for alias in config.model_alias if config.model_name}
    return EndpointTable(aliases, kept=named if config.cold_start_timeout else None)


def make_gate(
    config: RouterConfig, table: EndpointTable, keys: ApiKeys | None, faults: FaultBook | None
) -> Gate:  # fmt: skip
    """Return the gate for the settings."""
    num = config.workers
    limits = GateLimits(
        queue_size=math.ceil(config.queue_size / num),
        queue_timeout=config.queue_timeout,
        cold_start_timeout=config.cold_start_timeout,
        max_waiting_bytes=max(config.max_body_bytes, _MAX_WAITING_BYTES // num),
        num_processes=num,
    )
    tenant_named = (lambda name: None) if keys is None else keys.named
    rng = random.Random()  # noqa: S311 - spreads answers, guards nothing
    return Gate(FleetRooms(lambda: table.snapshot), limits, tenant_named, time.monotonic, rng.random, faults)


def _follow_parent(loop: asyncio.AbstractEventLoop, lifeline: int, signals: asyncio.Queue[int]) -> None:
    loop.remove_reader(lifeline)
    logger.error("the parent is gone: this worker ends")
    signals.put_nowait(signal.SIGTERM)


async def serve(config: RouterConfig, seat: Seat | None = None) -> int:
    """Run until a signal: the first one drains, the second ends everything at once. Returns the exit status."""
    sys.setswitchinterval(_SWITCH_S)
    keep_bodies()
    router = Router(config, seat=seat)
    gc.freeze()  # what lives as long as the process is not looked through for garbage, which takes 20 ms
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    if seat is not None:
        loop.add_reader(seat.lifeline, _follow_parent, loop, seat.lifeline, signals)
    with log_without_waiting("pagefleet_router"):
        return await _serve(router, config, signals)


async def _serve(router: Router, config: RouterConfig, signals: asyncio.Queue[int]) -> int:
    loop = asyncio.get_running_loop()
    async with router.running() as port:
        logger.info("listening on http://%s:%d, policy %s", config.host, port, config.policy)
        await _first_of(signals.get(), router.broken.wait())
        drain, again = loop.create_task(router.drain()), loop.create_task(signals.get())
        logger.info("draining %d requests", router.budget.live_requests)
        done, pending = await asyncio.wait({drain, again}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return 0 if drain in done and not router.broken.is_set() else 1


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
