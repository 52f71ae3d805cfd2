"""The paged-attention engine: scheduler, KV cache, models, OpenAI server, and its use in scripts."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pagefleet_protocol import version

if TYPE_CHECKING:
    from pagefleet_protocol.beam_search import BeamSearchParams
    from pagefleet_protocol.sampling_params import RequestOutputKind, SamplingParams
    from pagefleet_protocol.structured_outputs import StructuredOutputsParams

    from pagefleet_engine.async_llm import AsyncLLM, AsyncLLMEngine
    from pagefleet_engine.config import EngineConfig
    from pagefleet_engine.engine_args import AsyncEngineArgs, EngineArgs, FlexibleArgumentParser
    from pagefleet_engine.llm import LLM
    from pagefleet_engine.llm_engine import LLMEngine, TextPrompt, TokensPrompt
    from pagefleet_engine.results import CompletionOutput, RequestOutput

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "FlexibleArgumentParser",
    "LLMEngine",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

__version__ = version.VERSION
_MODULES = {
    "pagefleet_engine.async_llm": ("AsyncLLM", "AsyncLLMEngine"),
    "pagefleet_engine.config": ("EngineConfig",),
    "pagefleet_engine.engine_args": ("AsyncEngineArgs", "EngineArgs", "FlexibleArgumentParser"),
    "pagefleet_engine.llm": ("LLM",),
    "pagefleet_engine.llm_engine": ("LLMEngine", "TextPrompt", "TokensPrompt"),
    "pagefleet_engine.results": ("CompletionOutput", "RequestOutput"),
    "pagefleet_protocol.beam_search": ("BeamSearchParams",),
    "pagefleet_protocol.sampling_params": ("RequestOutputKind", "SamplingParams"),
    "pagefleet_protocol.structured_outputs": ("StructuredOutputsParams",),
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used: the package itself stays cheap to import."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
