"""pagefleet in Python: `from pagefleet import LLM, SamplingParams`, the names of pagefleet_engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from pagefleet_protocol.version import VERSION

if TYPE_CHECKING:
    from pagefleet_engine import *  # noqa: F403 - its __all__ is ours

__all__ = ["__version__"]

__version__ = VERSION


def __getattr__(name: str) -> object:
    """Look a public name up in the engine when it is first used: the package itself stays cheap to import.

    Raises:
        AttributeError: the engine has no such name.
    """
    engine = import_module("pagefleet_engine")
    if name not in engine.__all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(engine, name)
    return found


def __dir__() -> list[str]:
    return [*__all__, *import_module("pagefleet_engine").__all__]
