"""The server: `create_app` puts the parts together, `serve` is the whole life of the process.

SIGTERM  -> /readyz 503, new requests 503 -> open ones get `drain_timeout` -> the rest end with an error -> exit 0
again    -> the rest end with an error at once -> exit 0
engine dead -> open ones end with an error -> exit 1, so that somebody starts the process anew
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import uvloop
from pagefleet_console.pages import read_pages
from pagefleet_protocol.console_state import STATE_PATH
from pagefleet_protocol.cors import allow
from pagefleet_protocol.engine_facts import FACTS_PATH, TEXT_PATH, EngineFacts
from pagefleet_protocol.fleet_key import FleetKey, FleetKeyError, read_fleet_key
from pagefleet_protocol.openai_common import NO_RULES, RequestRules
from pagefleet_protocol.openapi import OPENAPI_PATH
from pagefleet_protocol.settings.log import set_up_logging
from pagefleet_protocol.tracing import NO_TRACER, Tracer
from pagefleet_text.text_model import TextModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.client.core_process import Surroundings
from pagefleet_engine.client.data_ranks import core_processes
from pagefleet_engine.config import EngineConfig, ServerConfig, default_cache_dir
from pagefleet_engine.engine_core.model_folder import resolve_model_folder, served_names
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.gpu_size import gpu_energy
from pagefleet_engine.local_model import bring_local_model
from pagefleet_engine.metrics import EngineMetrics, energy_series, rank_series
from pagefleet_engine.parsers.families import answer_family
from pagefleet_engine.parsers.family import AnswerFamily, MarkedFamily
from pagefleet_engine.server import text_work
from pagefleet_engine.server.access import AccessGate, ApiKeys, route_of
from pagefleet_engine.server.body import BodyReader
from pagefleet_engine.server.chat import ChatRoute
from pagefleet_engine.server.completions import CompletionRoute
from pagefleet_engine.server.console import EngineBoard, PageRoutes, Shown
from pagefleet_engine.server.cors import CorsGate
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import (
    Drain,
    DrainGate,
    FrontDoor,
    Listener,
    Running,
    StopSignals,
    bind,
    run_until_stopped,
)
from pagefleet_engine.server.loading import Loading, LoadingApp, Terminal, loading_page, tell_loading
from pagefleet_engine.server.messages_api.routes import MessagesRoute
from pagefleet_engine.server.middleware import ErrorSeam, HeadCheck, RequestRecord
from pagefleet_engine.server.operations import (
    FactsRoutes,
    InformationRoutes,
    ProbeRoutes,
    encoded_text,
    identity_headers,
    make_facts,
)
from pagefleet_engine.server.ports import ChatPrompt, Engine, Profiler, ServedModel, Tokenizer
from pagefleet_engine.server.profile import ProfileRoutes, made_profiler_dir
from pagefleet_engine.server.prompts import Prompts
from pagefleet_engine.server.rates import tell_rates
from pagefleet_engine.server.request_rules import request_rules
from pagefleet_engine.server.responses_api.create import ResponsesRoute
from pagefleet_engine.server.responses_api.shelf import ResponseShelf
from pagefleet_engine.server.responses_api.store import ResponseStore, StoreLimits, open_store
from pagefleet_engine.server.responses_api.stored import StoredResponses
from pagefleet_engine.server.route import TransferReader
from pagefleet_engine.server.service import Generator, Service
from pagefleet_engine.server.text_work import TextWork
from pagefleet_engine.server.tokenization import TokenizationRoutes
from pagefleet_engine.server.tracing import TraceRequests, make_engine_tracer, span_stats
from pagefleet_engine.text.model_files import load_text_model

logger = logging.getLogger(__name__)

PLAIN = MarkedFamily("plain")
"""A family whose text is all content."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What an app is made of."""

    engine: Engine
    tokenizer: Tokenizer
    chat: ChatPrompt
    model: ServedModel
    metrics: EngineMetrics
    pool: Executor
    drain: Drain
    open_requests: OpenRequests
    facts: EngineFacts
    text: bytes | None = None
    """The tokenizer and the chat template as routers get them; None: they do not."""
    keys: ApiKeys | None = None
    """None: no key is asked for."""
    transfers: TransferReader | None = None
    """None: the engine passes no K/V."""
    tracer: Tracer = NO_TRACER
    family: AnswerFamily = PLAIN
    """How the model writes thoughts and calls."""
    rules: RequestRules = NO_RULES
    shelf: ResponseShelf | None = None
    """Of stored responses; None: none is stored."""
    profiler: Profiler | None = None
    """None: no profiles are recorded."""


def create_app(parts: Parts, config: ServerConfig) -> Starlette:
    """Build the ASGI application."""
    work = TextWork(parts.pool)
    service = Service(
        model=parts.model,
        tokenizer=parts.tokenizer,
        prompts=Prompts(parts.tokenizer, parts.chat, parts.model.limits, work),
        generator=Generator(parts.engine, parts.metrics),
        bodies=BodyReader(config.max_body_bytes, work, transfers=parts.transfers),
        open_requests=parts.open_requests,
        metrics=parts.metrics,
        family=parts.family,
        template_names=parts.chat.template_names,
        rules=parts.rules,
    )
    board: EngineBoard | None = None
    if config.console:
        board = EngineBoard(Shown(parts.engine, parts.model, parts.facts, parts.drain, parts.metrics))
    routes = _routes(service, parts, board)
    cors, traced = allow(config.cors_origins), parts.tracer is not NO_TRACER
    methods = {route.path: sorted(route.methods or ()) for route in routes}
    outermost_first = [
        Middleware(RequestRecord, metrics=parts.metrics, access_log=config.access_log, board=board),
        *([Middleware(CorsGate, cors=cors, methods=lambda path: methods.get(route_of(path) or ""))] if cors else ()),
        *([Middleware(TraceRequests, tracer=parts.tracer)] if traced else ()),
        Middleware(ErrorSeam),
        Middleware(HeadCheck),
        Middleware(AccessGate, keys=parts.keys),
        Middleware(DrainGate, drain=parts.drain),
    ]
    app = Starlette(routes=routes, middleware=outermost_first, exception_handlers={HTTPException: _reraise})
    app.router.redirect_slashes = False
    return app


def _routes(service: Service, parts: Parts, board: EngineBoard | None) -> list[Route]:
    probes = ProbeRoutes(parts.engine, parts.drain)
    information = InformationRoutes(service, parts.metrics)
    tokenization = TokenizationRoutes(service)
    facts = FactsRoutes(parts.facts, parts.text)
    shelf = parts.shelf or ResponseShelf(None, parts.drain, parts.open_requests)
    responses, messages = ResponsesRoute(service, shelf), MessagesRoute(service)
    stored, profiles = StoredResponses(shelf, parts.open_requests), ProfileRoutes(parts.profiler)
    console = {} if board is None else {STATE_PATH: board.state}
    if board is not None:
        files = PageRoutes(read_pages())
        console |= dict.fromkeys(("/", "/docs", "/console/{file}"), files.file)
        console[OPENAPI_PATH] = files.openapi
    read = {
        "/livez": probes.livez,
        "/readyz": probes.readyz,
        "/health": probes.readyz,
        "/metrics": information.metrics,
        "/version": information.version,
        FACTS_PATH: facts.facts,
        TEXT_PATH: facts.text,
        "/v1/models": information.models,
        "/v1/models/{model:path}": information.model,
        "/v1/responses/{id}": stored.retrieve,
        "/v1/responses/{id}/input_items": stored.input_items,
        **console,
    }
    posted = {
        "/v1/chat/completions": ChatRoute(service).create,
        "/v1/completions": CompletionRoute(service).create,
        "/v1/responses": responses.create,
        "/v1/responses/input_tokens": responses.count,
        "/v1/responses/{id}/cancel": stored.cancel,
        "/v1/messages": messages.create,
        "/v1/messages/count_tokens": messages.count,
        "/tokenize": tokenization.tokenize,
        "/detokenize": tokenization.detokenize,
        "/start_profile": profiles.start,
        "/stop_profile": profiles.stop,
    }
    return [
        *(Route(path, endpoint, methods=["GET"]) for path, endpoint in read.items()),
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posted.items()),
        Route("/v1/responses/{id}", stored.delete, methods=["DELETE"]),
    ]


async def _reraise(request: Request, error: Exception) -> Response:
    """Let what the routing raises reach the error seam too."""
    raise error


def serve(config: EngineConfig, server: ServerConfig) -> int:
    """Run the server until it is told to stop or its engine dies.

    Returns:
        Exit status: 0 after a signal, 1 when the engine died.

    Raises:
        ConfigError: a setting cannot work, or the model cannot be loaded.
    """
    set_up_logging("server", "pagefleet_download", "pagefleet_engine", "pagefleet_kv")
    _log_errors_of_uvicorn()
    door = _Door(
        keys=_api_keys(server),
        fleet_key=_fleet_key(server) if "p2p" in config.kv_transfer.connectors else None,
        profiler_dir=made_profiler_dir(server.profiler_dir),
        listener=bind(server.host, server.port),
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, server, door))


def _log_errors_of_uvicorn() -> None:
    """Send uvicorn's errors where ours go; its warnings tell of every stray byte on the port."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:] = logging.getLogger("pagefleet_engine").handlers
    theirs.setLevel(logging.ERROR)
    theirs.propagate = False


@dataclass(frozen=True, slots=True)
class _Door:
    """What is checked before anything takes time, so that a mistake is told at once."""

    listener: Listener
    keys: ApiKeys | None
    fleet_key: FleetKey | None
    """With the connector p2p."""
    profiler_dir: str | None
    """Of profiles; it exists."""


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What is read of the model before its weights are."""

    text: TextModel
    family: AnswerFamily
    rules: RequestRules
    names: tuple[str, ...]
    tracer: Tracer


async def _serve(config: EngineConfig, server: ServerConfig, door: _Door) -> int:
    loading = Loading()
    page = loading_page(config.model.model, loading.progress, door.keys) if server.console else None
    with StopSignals() as signals, ThreadPoolExecutor(text_work.THREADS, "text") as pool, door.listener:
        async with AsyncExitStack() as after, FrontDoor(door.listener, LoadingApp(loading.progress, page)) as front:
            loaded = await signals.unless_stopped(_load(config, server, door, loading, pool, after))
            if loaded is None:
                return 0
            parts, running = loaded
            rates = tell_rates(parts.metrics, lambda: parts.engine.stats)
            telling = asyncio.create_task(rates) if server.log_rates else None
            try:
                front.open(create_app(parts, server), identity_headers(parts.facts))
                logger.info("serving %s on %s", parts.model.name, door.listener.url)
                return await run_until_stopped(front, signals, running)
            finally:
                if telling is not None:
                    telling.cancel()
                assert parts.shelf is not None
                await parts.shelf.close()


async def _load(
    config: EngineConfig, server: ServerConfig, door: _Door, loading: Loading, pool: Executor, after: AsyncExitStack
) -> tuple[Parts, Running]:
    """Download the model if need be, read its text, start its core; what is given to `after` ends behind the door."""
    loop, died = asyncio.get_running_loop(), asyncio.Event()
    async with _told(loading):
        config = await bring_local_model(config, os.environ, loading.download)
        inputs = await loop.run_in_executor(pool, _read_inputs, config, server)
        after.push_async_callback(asyncio.to_thread, inputs.tracer.close)
        around = Surroundings(server.kv_events, server.fleet_key_file, door.profiler_dir)
        engine = AsyncEngineClient(core_processes(config, around=around), inputs.text.tokenizer, died.set)
        after.push_async_callback(engine.close)
        loading.follow(engine.loading)
        encoding = loop.run_in_executor(pool, encoded_text, inputs.text)
        await engine.load()
        parts = _parts(config, server, door, inputs, _Loaded(engine, pool, await encoding))
    return parts, Running(parts.drain, parts.open_requests, died, server.drain_timeout, engine)


@asynccontextmanager
async def _told(loading: Loading) -> AsyncIterator[None]:
    telling = asyncio.create_task(tell_loading(loading.ranks, Terminal.of(sys.stderr, os.environ)))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.wait({telling})


def _read_inputs(config: EngineConfig, server: ServerConfig) -> _Inputs:
    """Read what is small.

    Raises:
        ConfigError: a setting cannot work with this model, or there is none.
    """
    folder = resolve_model_folder(config.model.model)
    tokenizer_folder = Path(config.model.tokenizer) if config.model.tokenizer else folder
    names = served_names(config.model.model, config.model.served_model_name)
    text = load_text_model(tokenizer_folder, folder)
    return _Inputs(
        text=text,
        family=answer_family(text.chat_template or "", server.tool_call_parser, server.reasoning_parser),
        rules=request_rules(config, server, folder),
        names=names,
        tracer=make_engine_tracer(server, names[0]),
    )


@dataclass(frozen=True, slots=True)
class _Loaded:
    engine: AsyncEngineClient
    pool: Executor
    text: bytes | None
    """See Parts."""


def _metrics(config: EngineConfig, server: ServerConfig, engine: AsyncEngineClient, name: str) -> EngineMetrics:
    ready, cache = engine.ready, config.cache
    metrics = EngineMetrics(name, lambda: engine.stats, ready.startup_seconds, config.max_requests)
    if config.parallel.data_parallel_size > 1:
        metrics.include(lambda: rank_series(engine.rank_stats))
    metrics.cache_config(
        {
            "block_size": ready.block_size,
            "num_blocks": ready.num_blocks,
            "kv_cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
        }
    )
    meter = gpu_energy(config.num_devices) if config.model.device != "cpu" else None
    if meter is not None:
        metrics.include(partial(energy_series, meter))
    if server.metrics_names == "vllm":
        metrics.add_vllm_names()
    return metrics


def _parts(config: EngineConfig, server: ServerConfig, door: _Door, inputs: _Inputs, loaded: _Loaded) -> Parts:
    name, *aliases = inputs.names
    engine, text = loaded.engine, loaded.text
    ready = engine.ready
    metrics = _metrics(config, server, engine, name)
    metrics.include(partial(span_stats, inputs.tracer))
    store = _response_store(server, name)
    drain, open_requests = Drain(config.max_in_flight), OpenRequests()
    shelf = ResponseShelf(store, drain, open_requests)
    metrics.include(shelf.stats)
    facts = make_facts(name, engine.incarnation, ready, config, server.kv_events_port or None, text)
    return Parts(
        engine=engine,
        tokenizer=inputs.text.tokenizer,
        chat=inputs.text,
        model=ServedModel(name, int(time.time()), engine.limits, tuple(aliases)),
        metrics=metrics,
        pool=loaded.pool,
        drain=drain,
        open_requests=open_requests,
        facts=msgspec.structs.replace(
            facts, response_store=None if store is None else store.name, revision=server.deployment_revision or None
        ),
        shelf=shelf,
        text=text,
        keys=door.keys,
        transfers=None if door.fleet_key is None else TransferReader(door.fleet_key, engine.incarnation),
        tracer=inputs.tracer,
        family=inputs.family,
        rules=inputs.rules,
        profiler=None if door.profiler_dir is None else engine,
    )


def _response_store(server: ServerConfig, model: str) -> ResponseStore | None:
    """Open a store of the model's responses: those of another model on this machine are none of its business.

    It is not below --cache-dir, which machines may share: a database wants a disk of this one.
    """
    if not server.response_store_size:
        return None
    folder = Path(server.response_store or default_cache_dir(None) / "responses")
    limits = StoreLimits(server.response_store_size, server.response_store_days * 86400)
    return open_store(folder.expanduser() / hashlib.sha256(model.encode()).hexdigest()[:16], limits)


def _api_keys(server: ServerConfig) -> ApiKeys | None:
    if server.api_key_file is not None:
        return ApiKeys(Path(server.api_key_file))
    return ApiKeys(server.api_key) if server.api_key else None


def _fleet_key(server: ServerConfig) -> FleetKey:
    """Read the key by which headers of transfers are checked.

    Raises:
        ConfigError: there is none.
    """
    if server.fleet_key_file is None:
        raise ConfigError("kv_connector p2p needs fleet_key_file: the secret of all engines and routers of the service")
    try:
        return read_fleet_key(Path(server.fleet_key_file))
    except FleetKeyError as error:
        raise ConfigError(f"fleet_key_file {server.fleet_key_file} {error}") from error
