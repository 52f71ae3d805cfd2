"""Routes for those who run the server: probes, metrics, version, the model list."""

from __future__ import annotations

import msgspec
from pagefleet_protocol.openai_common import ModelCard, ModelList
from pagefleet_protocol.version import VERSION
from starlette.requests import Request
from starlette.responses import Response

from pagefleet_engine.metrics import CONTENT_TYPE, EngineMetrics
from pagefleet_engine.server.drain import Drain
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.ports import Engine
from pagefleet_engine.server.responses import json_response
from pagefleet_engine.server.service import Service


class ProbeRoutes:
    """`/livez`: keep the process. `/readyz` and `/health`: send it traffic. All look at the engine's progress."""

    def __init__(self, engine: Engine, drain: Drain) -> None:
        self._engine = engine
        self._drain = drain

    async def livez(self, request: Request) -> Response:
        """Answer 200 unless the engine is gone or has made no step for a minute while work waits."""
        health = self._engine.health()
        if not health.live:
            raise _unavailable(health.alive, health.stalled_s)
        return json_response(b'{"status":"live"}')

    async def readyz(self, request: Request) -> Response:
        """Answer 200 unless the server drains, or the engine is gone or has made no step for ten seconds."""
        if self._drain.draining:
            raise HttpRefusal(503, "The server is shutting down.", code="server_shutting_down")
        health = self._engine.health()
        if not health.ready:
            raise _unavailable(health.alive, health.stalled_s)
        return json_response(b'{"status":"ready"}')


class InformationRoutes:
    """What the server is and how it does."""

    def __init__(self, service: Service, metrics: EngineMetrics) -> None:
        self._service = service
        self._metrics = metrics
        model = service.model
        self._cards = {
            name: ModelCard(id=name, created=model.created, max_model_len=model.limits.max_model_len)
            for name in model.names
        }

    async def version(self, request: Request) -> Response:
        """Return the version."""
        return json_response(msgspec.json.encode({"version": VERSION}))

    async def models(self, request: Request) -> Response:
        """Return the one model under each of its names."""
        return json_response(msgspec.json.encode(ModelList(data=tuple(self._cards.values()))))

    async def model(self, request: Request) -> Response:
        """Return the model by its id."""
        name = request.path_params["model"]
        self._service.check_model(name)
        return json_response(msgspec.json.encode(self._cards[name]))

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus text."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})


def _unavailable(alive: bool, stalled_s: float) -> HttpRefusal:
    reason = f"made no progress for {stalled_s:.0f} s" if alive else "stopped"
    return HttpRefusal(503, f"The engine has {reason}.", code="engine_stalled" if alive else "engine_dead")
