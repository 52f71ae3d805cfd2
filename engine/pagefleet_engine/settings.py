"""What `pagefleet serve` and `LLM()` can be told: the fields of the dataclasses in `config`, and vLLM's options."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.errors import KVConfigError
from pagefleet_protocol.exit_status import MODEL_NOT_LOADED
from pagefleet_protocol.settings.foreign import ForeignOption, read_foreign
from pagefleet_protocol.settings.program import Program

from pagefleet_engine.config import (
    CacheConfig,
    EngineConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    StructuredOutputsConfig,
)
from pagefleet_engine.errors import AddressTaken, ConfigError, ModelLoadError
from pagefleet_engine.gpu_size import first_gpu
from pagefleet_engine.ranks.parallelism import Parallelism


@functools.cache
def vllm_options() -> Mapping[str, ForeignOption]:
    """Return what each of vLLM's options means here, by its name there."""
    return read_foreign((files("pagefleet_engine") / "vllm_options.toml").read_text(encoding="utf-8"))


SERVE = Program(
    name="pagefleet serve",
    description="Serves a model with an OpenAI-compatible API.",
    groups={
        "model": ModelConfig,
        "KV cache": CacheConfig,
        "scheduling": SchedulerConfig,
        "execution": ExecutionConfig,
        "structured output": StructuredOutputsConfig,
        "KV transfer": KVTransferConfig,
        "parallelism": Parallelism,
        "server": ServerConfig,
    },
    environment="PAGEFLEET_ENGINE_",
    error=ConfigError,
    positional=("model",),
    foreign=vllm_options,
    epilog=f"Status {MODEL_NOT_LOADED}: a model that cannot be loaded.",
)
ENGINE_SETTINGS = {name: one for name, one in SERVE.settings.items() if one.group is not ServerConfig}


def told_status(error: ConfigError, program: Program = SERVE) -> int:
    """Print what went wrong; returns the exit status of a server, or another program, that ends with it."""
    status = program.tell(error)
    match error:
        case AddressTaken():
            return 1
        case ModelLoadError():
            return MODEL_NOT_LOADED
    return status


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """Build an EngineConfig from a flat mapping of its fields; a value may be text.

    Raises:
        ConfigError: a value is of the wrong type or out of its range.
        KeyError: a name is no setting of the engine.
    """
    try:
        parsed = {name: ENGINE_SETTINGS[name].parse(value, name) for name, value in values.items()}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if "model" not in parsed:
        raise ConfigError(
            "no model is given: name one of the hub (organization/name), a folder in its layout, or builtin://tiny"
        )
    _fit_sizes(parsed)
    try:
        kv_transfer = SERVE.build(KVTransferConfig, parsed)
    except KVConfigError as error:
        raise ConfigError(str(error)) from None
    return EngineConfig(
        model=SERVE.build(ModelConfig, parsed),
        cache=SERVE.build(CacheConfig, parsed),
        scheduler=SERVE.build(SchedulerConfig, parsed),
        execution=SERVE.build(ExecutionConfig, parsed),
        structured_outputs=SERVE.build(StructuredOutputsConfig, parsed),
        kv_transfer=kv_transfer,
        parallel=SERVE.build(Parallelism, parsed),
    )


def _fit_sizes(values: dict[str, Any]) -> None:
    """Tokens per step by the GPU's size unless given; where only one of seats and tokens is given, the other's default
    gives way to it."""
    seats, tokens = values.get("max_num_seqs"), values.get("max_num_batched_tokens")
    default = SchedulerConfig()
    if tokens is None:
        gpu = first_gpu() if values.get("device", "auto") != "cpu" else None
        fitting = default.max_num_batched_tokens if gpu is None else gpu.step_tokens(default.max_num_batched_tokens)
        values["max_num_batched_tokens"] = max(fitting, seats or 0)
    elif seats is None:
        values["max_num_seqs"] = min(default.max_num_seqs, tokens)
