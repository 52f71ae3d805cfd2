"""What may happen to a `FakeEngine`: requests arrive, leave amid a step or between two, and steps pass."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_engine.core.request import Request
from pagefleet_engine.errors import ContextTooLong, QueueFull
from pagefleet_protocol.block_hash import PrefixScope
from pagefleet_protocol.sampling_params import SamplingParams

from tests.fakes.paged_worker import FakeEngine, complete

MAX_QUEUED = 8
"""Requests that an engine of a trace lets wait."""


@dataclass(frozen=True)
class Arrival:
    """A request comes; it may be refused."""

    prompt: list[int]
    sampling: SamplingParams
    priority: int
    scope: PrefixScope


@dataclass(frozen=True)
class Abort:
    """The client of a request leaves, which may be over."""

    age: int
    """How many were accepted after it."""
    amid_step: bool


@dataclass(frozen=True)
class Steps:
    """Time passes."""

    count: int


Event = Arrival | Abort | Steps


class Trace:
    """Plays events against one engine and remembers what was accepted."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.accepted: dict[str, tuple[Arrival, Request]] = {}

    def play(self, event: Event) -> None:
        match event:
            case Arrival():
                self._arrive(event)
            case Steps(count):
                for _ in range(count):
                    self.step()
            case Abort(age, amid_step):
                self._abort(self.name(age), amid_step)

    def step(self) -> None:
        """Let the engine go on."""
        self.engine.step()

    def name(self, age: int) -> str:
        """The request after which so many were accepted; -1: the next that will be."""
        return f"r{len(self.accepted) - 1 - age}"

    def expected(self, name: str) -> list[int]:
        """The tokens that a request has when nothing disturbs it."""
        arrival, _ = self.accepted[name]
        return complete(arrival.prompt, arrival.sampling, arrival.scope, self.engine.scheduler.max_model_len)

    def _arrive(self, arrival: Arrival) -> None:
        name, scheduler = self.name(-1), self.engine.scheduler
        try:
            request = self.engine.add(
                name, arrival.prompt, arrival.sampling, priority=arrival.priority, scope=arrival.scope
            )
        except ContextTooLong:
            assert len(arrival.prompt) >= scheduler.max_model_len
        except QueueFull:
            assert scheduler.stats().requests_waiting >= MAX_QUEUED
        else:
            self.accepted[name] = (arrival, request)

    def _abort(self, name: str, amid_step: bool) -> None:
        engine = self.engine
        if not amid_step:
            engine.abort(name)
            return
        engine.launch()
        engine.abort(name)
        if engine.in_flight:
            engine.land()
