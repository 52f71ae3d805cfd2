"""What the generating routes share: one served model and the parts that serve it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_protocol.openai_json import shown
from starlette.requests import Request

from pagefleet_engine.client.stream import Chunks, Generation
from pagefleet_engine.metrics import EngineMetrics
from pagefleet_engine.server.body import BodyReader
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.generation import Generator
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.ports import ServedModel, Tokenizer
from pagefleet_engine.server.prompts import Prompts
from pagefleet_engine.server.tracing import Arrival, span_of, traced


@dataclass(frozen=True, slots=True)
class Service:
    """Made once by `create_app`, given to every route."""

    model: ServedModel
    tokenizer: Tokenizer
    prompts: Prompts
    generator: Generator
    bodies: BodyReader
    open_requests: OpenRequests
    metrics: EngineMetrics

    def arrival(self, request: Request) -> Arrival:
        """Return that a request is there, now."""
        return Arrival(self.generator.now(), span_of(request.scope))

    def generate(self, asked: Generation, arrival: Arrival) -> Chunks:
        """Run the choices of a request, see `Generator.run`."""
        chunks = self.generator.run(asked, arrival.at)
        return traced(chunks, asked, arrival, self.generator.now) if arrival.span.is_kept else chunks

    def check_model(self, name: str) -> None:
        """Refuse any name but the served model's.

        Raises:
            HttpRefusal: 404, with the name cut and escaped.
        """
        if name not in self.model.names:
            message = f"The model {shown(name)} does not exist; this server has '{self.model.name}'."
            raise HttpRefusal(404, message, param="model", code="model_not_found")

    def count_ignored(self, fields: Sequence[str]) -> None:
        """Count body fields that nobody reads."""
        if fields:
            self.metrics.ignored_fields(fields)
