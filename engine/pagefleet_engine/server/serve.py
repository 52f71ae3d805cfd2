"""The whole life of the process that serves an engine: it starts the cores, and API processes beside itself.

SIGTERM  -> /readyz 503, new requests 503 -> open ones get `drain_timeout` -> the rest end with an error -> exit 0
again    -> the rest end with an error at once -> exit 0
engine dead -> open ones end with an error -> exit 1, so that somebody starts the process anew
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec
import uvloop
from pagefleet_protocol.settings.log import set_up_logging
from pagefleet_protocol.workers.siblings import Siblings
from starlette.types import ASGIApp

from pagefleet_engine.client.api_seat import ALONE
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.child_process import ChildProcess
from pagefleet_engine.client.core_process import Surroundings
from pagefleet_engine.client.data_ranks import core_processes
from pagefleet_engine.config import EngineConfig, ServerConfig
from pagefleet_engine.local_model import bring_local_model
from pagefleet_engine.server import text_work
from pagefleet_engine.server.app import Parts, create_app
from pagefleet_engine.server.assembly import (
    Around,
    Inputs,
    Keys,
    log_errors_of_uvicorn,
    make_parts,
    open_response_store,
)
from pagefleet_engine.server.lifecycle import (
    STOP_SIGNALS,
    FrontDoor,
    Listener,
    Running,
    StopSignals,
    bind,
    run_until_stopped,
)
from pagefleet_engine.server.loading import Loading, LoadingApp, loading_page, telling
from pagefleet_engine.server.operations import encoded_text, identity_headers, make_facts
from pagefleet_engine.server.profile import made_profiler_dir
from pagefleet_engine.server.rates import tell_rates
from pagefleet_engine.startup import process_age

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parent:
    """Who has started this process, as far as it makes a difference."""

    stop_on: Sequence[signal.Signals] = STOP_SIGNALS
    """What it, or a person, sends."""
    serving: Callable[[], None] = lambda: None
    """Called once requests are taken."""
    core: ChildProcess | None = None
    """That it has begun for the engine's only core."""


def serve(config: EngineConfig, server: ServerConfig, parent: Parent = Parent()) -> int:
    """Run the server until it is told to stop or its engine dies.

    Returns:
        Exit status: 0 after a signal, 1 when the engine died.

    Raises:
        ConfigError: a setting cannot work, or the model cannot be loaded.
    """
    rank = config.parallel.data_parallel_rank
    name = "server" if rank is None else f"rank {rank}"
    set_up_logging(name, "pagefleet_download", "pagefleet_engine", "pagefleet_kv")
    log_errors_of_uvicorn()
    door = _Door(
        keys=Keys.read(config, server),
        profiler_dir=made_profiler_dir(server.profiler_dir),
        listener=bind(server.host, server.port, server.api_server_count),
        imported=process_age(),
        core=parent.core,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, server, door, parent))


@dataclass(frozen=True, slots=True)
class _Door:
    """What is checked before anything takes time, so that a mistake is told at once."""

    listener: Listener
    keys: Keys
    profiler_dir: str | None
    """Of profiles; it exists."""
    imported: float
    """Seconds from the process's start to the end of its imports."""
    core: ChildProcess | None
    """See Parent."""


async def _serve(config: EngineConfig, server: ServerConfig, door: _Door, parent: Parent) -> int:
    loading = Loading()
    page = loading_page(config.model.model, loading.progress, door.keys.api) if server.console else None
    loading_app = LoadingApp(loading.progress, page)
    with StopSignals(parent.stop_on) as signals, ThreadPoolExecutor(text_work.THREADS, "text") as pool, door.listener:
        async with AsyncExitStack() as after, FrontDoor(door.listener.sock, loading_app) as front:
            loaded = await signals.unless_stopped(_load(config, server, door, loading, pool, after))
            if loaded is None:
                return 0
            parts, running = loaded.parts, loaded.running
            assert parts.figures is not None
            rates = tell_rates(parts.figures.text, lambda: parts.engine.stats)
            told = asyncio.create_task(rates) if server.log_rates else None
            try:
                front.open(loaded.app, identity_headers(parts.facts))
                logger.info("serving %s on %s", parts.model.name, door.listener.url)
                parent.serving()
                return await run_until_stopped(front, signals, running)
            finally:
                if told is not None:
                    told.cancel()
                assert parts.shelf is not None
                await parts.shelf.close()


@dataclass(frozen=True, slots=True)
class _Loaded:
    parts: Parts
    app: ASGIApp
    running: Running


async def _load(
    config: EngineConfig, server: ServerConfig, door: _Door, loading: Loading, pool: Executor, after: AsyncExitStack
) -> _Loaded:
    """Download the model, read its text, start all processes; what is given to `after` ends behind the door."""
    loop, died = asyncio.get_running_loop(), asyncio.Event()
    async with telling(loading):
        config = await bring_local_model(config, os.environ, loading.download)
        read = time.monotonic()
        inputs = await loop.run_in_executor(pool, Inputs.read, config, server)
        tokenizer_s = time.monotonic() - read
        after.push_async_callback(asyncio.to_thread, inputs.tracer.close)
        others = None
        if door.listener.others:
            from pagefleet_engine.server.api_processes import ApiProcesses  # noqa: PLC0415 one alone needs no HTTP client

            others = ApiProcesses(config, server, door.listener.others)
            after.push_async_callback(others.close)
            others.start()
        seat = ALONE if others is None else others.first_seat
        around = Surroundings(server.kv_events, server.fleet_key_file, door.profiler_dir, num_askers=seat.num)

        def engine_died() -> None:
            died.set()
            if others is not None:
                others.end()

        cores = core_processes(config, around=around, ahead=door.core)
        engine = AsyncEngineClient(cores, inputs.text.tokenizer, engine_died, seat)
        after.push_async_callback(engine.close)
        loading.follow(engine.loading)
        encoding = loop.run_in_executor(pool, encoded_text, inputs.text)
        await engine.load()
        text, name = await encoding, inputs.names[0]
        store = open_response_store(server, name)
        facts = msgspec.structs.replace(
            make_facts(name, engine.running_cores, config, server.kv_events_port or None, text),
            response_store=None if store is None else store.name,
            revision=server.deployment_revision or None,
        )
        siblings = None if others is None else Siblings(others.folder, 0, seat.num)
        startup = {"server_imports": door.imported, "tokenizer": tokenizer_s, "server_ready": process_age()}
        own = Around(engine, facts, int(time.time()), pool, seat, siblings, text, store, startup)
        parts = make_parts(config, server, door.keys, inputs, own)
        app = create_app(parts, server)
        if others is not None and siblings is not None:
            from pagefleet_engine.server.api_process import ApiOpen  # noqa: PLC0415 as above

            await siblings.start()
            after.push_async_callback(siblings.stop)
            await after.enter_async_context(others.relayed_to(app))
            parts.metrics.include(others.stats)
            others.open(ApiOpen(engine.running_cores, facts, own.created, startup), engine)
            await others.opened()
    return _Loaded(parts, app, Running(parts.drain, parts.open_requests, died, server.drain_timeout, engine, others))
