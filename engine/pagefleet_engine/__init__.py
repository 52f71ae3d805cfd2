"""The paged-attention engine: scheduler, KV cache, models, OpenAI server, offline LLM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefleet_engine.config import EngineConfig
    from pagefleet_engine.llm import LLM
    from pagefleet_engine.results import CompletionOutput, RequestOutput
    from pagefleet_engine.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the package itself stays cheap to import."""
    match name:
        case "LLM":
            module = "llm"
        case "CompletionOutput" | "RequestOutput":
            module = "results"
        case "EngineConfig":
            module = "config"
        case "SamplingParams":
            module = "sampling_params"
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)
