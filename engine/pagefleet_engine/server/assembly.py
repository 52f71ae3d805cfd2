"""From configuration and engine to the parts of an API process."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.fleet_key import FleetKey, FleetKeyError, read_fleet_key
from pagefleet_protocol.openai_common import RequestRules
from pagefleet_protocol.tracing import Tracer
from pagefleet_protocol.workers.siblings import Siblings
from pagefleet_text.text_model import TextModel

from pagefleet_engine.client.api_seat import ApiSeat
from pagefleet_engine.client.async_client import AsyncEngineClient
from pagefleet_engine.config import EngineConfig, ServerConfig, default_cache_dir
from pagefleet_engine.engine_core.model_folder import resolve_model_folder, served_names
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.gpu_size import gpu_energy
from pagefleet_engine.metrics import EngineMetrics, energy_series, rank_series
from pagefleet_engine.parsers.families import answer_family
from pagefleet_engine.parsers.family import AnswerFamily
from pagefleet_engine.server.access import ApiKeys
from pagefleet_engine.server.app import Parts
from pagefleet_engine.server.figures import EngineFigures
from pagefleet_engine.server.interruption import OpenRequests
from pagefleet_engine.server.lifecycle import Drain
from pagefleet_engine.server.ports import ServedModel
from pagefleet_engine.server.responses_api.shelf import ResponseShelf
from pagefleet_engine.server.responses_api.store import ResponseStore, StoreLimits, open_store
from pagefleet_engine.server.route import TransferReader
from pagefleet_engine.server.tracing import make_engine_tracer, span_stats
from pagefleet_engine.text.generation import recommended_sampling
from pagefleet_engine.text.model_files import load_text_model


def log_errors_of_uvicorn() -> None:
    """Send uvicorn's errors where ours go; its warnings tell of every stray byte on the port."""
    theirs = logging.getLogger("uvicorn")
    theirs.handlers[:] = logging.getLogger("pagefleet_engine").handlers
    theirs.setLevel(logging.ERROR)
    theirs.propagate = False


@dataclass(frozen=True, slots=True)
class Keys:
    """By which callers are known."""

    api: ApiKeys | None
    fleet: FleetKey | None
    """With the connector p2p."""

    @classmethod
    def read(cls, config: EngineConfig, server: ServerConfig) -> Keys:
        """Read the files that the settings name.

        Raises:
            ConfigError: one is missing or has no key.
        """
        return cls(_api_keys(server), _fleet_key(server) if "p2p" in config.kv_transfer.connectors else None)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is read of the model before its weights are."""

    text: TextModel
    family: AnswerFamily
    rules: RequestRules
    names: tuple[str, ...]
    tracer: Tracer

    @classmethod
    def read(cls, config: EngineConfig, server: ServerConfig) -> Inputs:
        """Read what is small.

        Raises:
            ConfigError: a setting cannot work with this model, or there is none.
        """
        folder = resolve_model_folder(config.model.model)
        tokenizer_folder = Path(config.model.tokenizer) if config.model.tokenizer else folder
        names = served_names(config.model.model, config.model.served_model_name)
        text = load_text_model(tokenizer_folder, folder, config.model.hf_overrides)
        return cls(
            text=text,
            family=answer_family(text.chat_template or "", server.tool_call_parser, server.reasoning_parser),
            rules=request_rules(config, server, folder),
            names=names,
            tracer=make_engine_tracer(server, names[0]),
        )


def request_rules(config: EngineConfig, server: ServerConfig, folder: Path) -> RequestRules:
    """Return what the operator lets requests have, and the sampling that the model's makers recommend where they say
    nothing.

    Args:
        config: of the engine.
        server: of the server.
        folder: of the model.

    Raises:
        ConfigError: generation_config.json recommends what no request may ask for.
    """
    recommended = recommended_sampling(config.model.generation_config, folder)
    return RequestRules(
        sampling_defaults=recommended.sampling,
        max_new_tokens=recommended.max_new_tokens,
        max_logprobs=config.model.max_logprobs,
        trust_chat_template=server.trust_request_chat_template,
    )


@dataclass(frozen=True, slots=True)
class Around:
    """What an API process has to do with."""

    engine: AsyncEngineClient
    facts: EngineFacts
    created: int
    """Unix time of the engine's start."""
    pool: Executor
    seat: ApiSeat
    siblings: Siblings | None
    text: bytes | None = None
    """See Parts."""
    store: ResponseStore | None = None
    """Of responses; the first process alone has it."""
    startup_seconds: Mapping[str, float] = field(default_factory=dict)
    """Of the first process, beside those of the cores."""


def make_parts(config: EngineConfig, server: ServerConfig, keys: Keys, inputs: Inputs, around: Around) -> Parts:
    """Return what the application of a process is made of."""
    name, *aliases = inputs.names
    engine = around.engine
    metrics = _metrics(config, server, around, name)
    metrics.include(partial(span_stats, inputs.tracer))
    in_flight = None if engine.notebook is None else engine.notebook.in_flight
    drain, open_requests = Drain(config.max_in_flight, in_flight, around.seat.index), OpenRequests()
    shelf = ResponseShelf(around.store, drain, open_requests)
    if around.seat.index == 0:
        metrics.include(shelf.stats)
    return Parts(
        engine=engine,
        tokenizer=inputs.text.tokenizer,
        chat=inputs.text,
        model=ServedModel(name, around.created, engine.limits, tuple(aliases)),
        metrics=metrics,
        pool=around.pool,
        drain=drain,
        open_requests=open_requests,
        facts=around.facts,
        shelf=shelf,
        text=around.text,
        keys=keys.api,
        transfers=None if keys.fleet is None else TransferReader(keys.fleet, engine.incarnations),
        tracer=inputs.tracer,
        family=inputs.family,
        rules=inputs.rules,
        profiler=None if server.profiler_dir is None else engine,
        figures=EngineFigures(metrics, around.siblings),
    )


def _metrics(config: EngineConfig, server: ServerConfig, around: Around, name: str) -> EngineMetrics:
    engine, cache = around.engine, config.cache
    ready = engine.ready
    startup = {**ready.startup_seconds, **around.startup_seconds}
    metrics = EngineMetrics(name, lambda: engine.stats, startup, config.max_requests)
    if config.parallel.data_ranks > 1:
        metrics.include(lambda: rank_series(engine.rank_stats), of_engine=True)
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
        metrics.include(partial(energy_series, meter), of_engine=True)
    if server.metrics_names == "vllm":
        metrics.add_vllm_names()
    return metrics


def open_response_store(server: ServerConfig, model: str) -> ResponseStore | None:
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
