"""Traces of all ranks' steps: each rank writes its own, named by its number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from pagefleet_engine.errors import ProfileRefused
from pagefleet_engine.executor.messages import StartTrace, StopTrace, Traced
from pagefleet_engine.executor.trace import SUFFIX

Ask = Callable[[StartTrace | StopTrace], Mapping[str, Traced]]
"""All ranks; returns what each answered, by its name, once all have."""


class RankTraces:
    """Implements `StepTrace` over ranks."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def start(self) -> None:
        """See StepTrace. Where one rank cannot, none records."""
        try:
            self._ask_all(StartTrace())
        except ProfileRefused:
            self._ask(StopTrace(""))
            raise

    def stop(self, stem: Path) -> Path:
        """See StepTrace. Ranks of other machines write there, to the same path."""
        self._ask_all(StopTrace(str(stem)))
        return stem.with_name(f"{stem.name}-rank*{SUFFIX}")

    def _ask_all(self, command: StartTrace | StopTrace) -> None:
        for name, answer in self._ask(command).items():
            if answer.refused:
                raise ProfileRefused(f"{name}: {answer.refused}")
