"""The ASGI application: routes, and what every request passes, from the parts of a process."""

from __future__ import annotations

import logging
from concurrent.futures import Executor
from dataclasses import dataclass

from pagefleet_console.pages import read_pages
from pagefleet_protocol.console_state import STATE_PATH
from pagefleet_protocol.cors import allow
from pagefleet_protocol.engine_facts import FACTS_PATH, TEXT_PATH, EngineFacts
from pagefleet_protocol.openai_common import NO_RULES, RequestRules
from pagefleet_protocol.openapi import OPENAPI_PATH
from pagefleet_protocol.tracing import NO_TRACER, Tracer
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagefleet_engine.config import ServerConfig
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.parsers.family import AnswerFamily, MarkedFamily
from pagefleet_engine.server.access import AccessGate, ApiKeys, route_of
from pagefleet_engine.server.body import BodyReader
from pagefleet_engine.server.chat import ChatRoute
from pagefleet_engine.server.completions import CompletionRoute
from pagefleet_engine.server.console import EngineBoard, PageRoutes, Shown
from pagefleet_engine.server.cors import CorsGate
from pagefleet_engine.server.figures import EngineFigures
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import (
    Drain,
    DrainGate,
)
from pagefleet_engine.server.messages_api.routes import MessagesRoute
from pagefleet_engine.server.middleware import ErrorSeam, HeadCheck, RequestRecord
from pagefleet_engine.server.operations import (
    FactsRoutes,
    InformationRoutes,
    ProbeRoutes,
)
from pagefleet_engine.server.ports import ChatPrompt, Engine, Profiler, ServedModel, Tokenizer
from pagefleet_engine.server.profile import ProfileRoutes
from pagefleet_engine.server.prompts import Prompts
from pagefleet_engine.server.responses_api.create import ResponsesRoute
from pagefleet_engine.server.responses_api.shelf import ResponseShelf
from pagefleet_engine.server.responses_api.stored import StoredResponses
from pagefleet_engine.server.route import TransferReader
from pagefleet_engine.server.service import Generator, Service
from pagefleet_engine.server.text_work import TextWork
from pagefleet_engine.server.tokenization import TokenizationRoutes
from pagefleet_engine.server.tracing import TraceRequests

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
    figures: EngineFigures | None = None
    """None: of this process alone."""


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
    figures = parts.figures or EngineFigures(parts.metrics)
    if config.console:
        board = EngineBoard(Shown(parts.engine, parts.model, parts.facts, parts.drain, figures))
    routes = _routes(service, parts, figures, board)
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


def _routes(service: Service, parts: Parts, figures: EngineFigures, board: EngineBoard | None) -> list[Route]:
    probes = ProbeRoutes(parts.engine, parts.drain)
    information = InformationRoutes(service, figures)
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
