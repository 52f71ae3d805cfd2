"""Routes for those who run the server (probes, metrics, version, models) and for routers (facts, text)."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from urllib.parse import quote

import msgspec
from pagefleet_protocol import headers
from pagefleet_protocol.engine_facts import (
    MAX_TEXT_BYTES,
    CacheFacts,
    EngineFacts,
    encode_facts,
    encode_text,
    text_digest,
)
from pagefleet_protocol.openai_common import ModelCard, ModelList
from pagefleet_protocol.version import VERSION
from pagefleet_text.text_model import TextModel
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pagefleet_engine.client.core_process import RunningCore
from pagefleet_engine.client.data_ranks import joint_ready
from pagefleet_engine.config import EngineConfig
from pagefleet_engine.metrics import CONTENT_TYPE
from pagefleet_engine.rank_settings import events_port
from pagefleet_engine.server.errors import HttpRefusal
from pagefleet_engine.server.figures import EngineFigures
from pagefleet_engine.server.lifecycle import Drain
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

    def __init__(self, service: Service, figures: EngineFigures) -> None:
        self._service = service
        self._figures = figures
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
        return Response(await self._figures.text(), headers={"content-type": CONTENT_TYPE})


def _unavailable(alive: bool, stalled_s: float) -> HttpRefusal:
    reason = f"made no progress for {stalled_s:.0f} s" if alive else "stopped"
    return HttpRefusal(503, f"The engine has {reason}.", code="engine_stalled" if alive else "engine_dead")


logger = logging.getLogger(__name__)

_PIECE_BYTES = 256 * 1024
_HEADER_SAFE = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")


def make_facts(
    model: str,
    cores: Sequence[RunningCore],
    config: EngineConfig,
    kv_events_port: int | None,
    text: bytes | None,
) -> EngineFacts:
    """Return the facts of one start of the engine.

    Args:
        model: the first of its names.
        cores: one for each data rank.
        config: of the engine.
        kv_events_port: of the first; None where no events are published.
        text: what `TEXT_PATH` answers; None where it has nothing.
    """
    ready = joint_ready([core.ready for core in cores])
    events = [kv_events_port and events_port(kv_events_port, rank) for rank, _ in enumerate(cores)]
    several = len(cores) > 1
    return EngineFacts(
        incarnation=cores[0].incarnation,
        model=model,
        scope=ready.scope,
        block_size=ready.block_size,
        num_blocks=ready.num_blocks,
        max_model_len=ready.max_model_len,
        max_num_seqs=config.max_requests,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        vocab_size=ready.vocab_size,
        prefix_caching=config.cache.enable_prefix_caching,
        kv_events_port=None if several else kv_events_port,
        text_digest=None if text is None else text_digest(text),
        kv_transfer=ready.kv_transfer,
        data_ranks=tuple(map(_cache_facts, cores, events)) if several else (),
    )


def _cache_facts(core: RunningCore, kv_events_port: int | None) -> CacheFacts:
    transfer = core.ready.kv_transfer
    return CacheFacts(
        incarnation=core.incarnation,
        num_blocks=core.ready.num_blocks,
        kv_events_port=kv_events_port,
        kv_transfer_port=None if transfer is None else transfer.port,
    )


def encoded_text(model: TextModel) -> bytes | None:
    """Return what `TEXT_PATH` answers; None for a text side that cannot be data. Takes a second for a large one."""
    try:
        text = encode_text(model.data())
    except UnicodeEncodeError:
        logger.warning("routers must do without this model's tokenizer: its files hold text that is no Unicode")
        return None
    if len(text) > MAX_TEXT_BYTES:
        logger.warning("routers must do without this model's tokenizer: it has %d bytes", len(text))
        return None
    return text


def identity_headers(facts: EngineFacts) -> tuple[tuple[str, str], ...]:
    """Return the headers that every answer carries."""
    return (headers.INCARNATION, facts.incarnation), (headers.MODEL, quote(facts.model, safe=_HEADER_SAFE))


class FactsRoutes:
    """Answers routers.

    Args:
        facts: of this start.
        text: what `TEXT_PATH` answers, None: 404.
    """

    def __init__(self, facts: EngineFacts, text: bytes | None) -> None:
        self._facts = encode_facts(facts)
        self._text = text
        self._etag = f'"{facts.text_digest}"'

    async def facts(self, request: Request) -> Response:
        """Return the facts."""
        return json_response(self._facts)

    async def text(self, request: Request) -> Response:
        """Return tokenizer and chat template, unless the caller has them already.

        Raises:
            HttpRefusal: there is nothing to return.
        """
        if self._text is None:
            raise HttpRefusal(404, "This engine gives no tokenizer away.", code="no_text")
        if _has(request.headers.get("if-none-match", ""), self._etag):
            return Response(status_code=304, headers={"etag": self._etag})
        own = {"etag": self._etag, "content-length": str(len(self._text))}
        return StreamingResponse(_pieces(self._text), media_type="application/json", headers=own)


def _has(if_none_match: str, etag: str) -> bool:
    """Compare as RFC 9110, section 13.1.2, asks: weakly, with any of a list."""
    return any(one.strip().removeprefix("W/") in ("*", etag) for one in if_none_match.split(","))


async def _pieces(data: bytes) -> AsyncIterator[bytes]:
    """Cut megabytes, so that a slow reader does not keep a copy of them."""
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
