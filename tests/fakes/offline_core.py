"""The core behind an `LLM`, for tests that look at it or drive it. No test in here."""

from __future__ import annotations

from pagefleet_engine import LLM
from pagefleet_engine.engine_core.engine_core import EngineCore


def core_of(llm: LLM) -> EngineCore:
    """Return the core, which is in this process."""
    core = llm.llm_engine._core
    assert isinstance(core, EngineCore)
    return core
