"""A core's process that is begun as soon as the settings are known: it imports torch while its server imports what is
its own, finds the model and reads the tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from pagefleet_engine.client.child_process import ChildProcess
from pagefleet_engine.config import EngineConfig

CORE_COMMAND = (sys.executable, "-P", "-m", "pagefleet_engine.engine_core.process")


@contextmanager
def core_ahead(config: EngineConfig) -> Iterator[ChildProcess | None]:
    """A process for the engine's only core, ended with the context; None where it has several, whose settings and
    devices are shared out later."""
    if config.parallel.data_parallel_size > 1:
        yield None
        return
    child = ChildProcess((*CORE_COMMAND, "--ahead"), {})
    try:
        child.begin()
        child.tell(msgspec.json.encode(config))
        yield child
    finally:
        child.stop()
