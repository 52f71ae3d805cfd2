"""What a policy is: it chooses one engine out of the candidates, and can say why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.request_view import RequestView


class Choice:
    """An engine, and how many leading tokens of the prompt it probably has cached.

    Not a dataclass: one is made per request, and compiled it is made five times as fast.
    """

    __slots__ = ("cached_tokens", "engine", "prefill", "rank")

    def __init__(
        self, engine: EngineView, cached_tokens: int = 0, prefill: Choice | None = None, rank: int | None = None
    ) -> None:
        self.engine: Final = engine
        self.rank: Final = rank
        """Its data rank that gets the request, where K/V is passed between two; None: it chooses."""
        self.cached_tokens: Final = cached_tokens
        self.prefill: Final = prefill
        """The engine that computes the prompt for it; None: it does that itself."""

    @property
    def computes(self) -> Choice:
        """Where the prompt is computed."""
        return self.prefill or self

    @property
    def kind(self) -> Literal["none", "local", "remote"]:
        """`remote`: another engine computes the prompt; `local`: a decode engine does, though that is not its part."""
        if self.prefill is not None:
            return "remote"
        return "local" if self.engine.role == "decode" else "none"


@dataclass(frozen=True, slots=True)
class Score:
    """How one engine looked to a request."""

    engine_id: str
    seconds: float
    """The cost; the lowest wins, apart from what `reason` says."""
    cached_tokens: int
    queued_tokens: int
    """Uncached prompt tokens that this router has waiting there."""
    reason: str
    """What sets it apart, in words; empty: nothing does."""
    prefill_id: str = ""
    """The engine that would compute the prompt for it; empty: itself."""


class Policy(Protocol):
    """Chooses among candidates (at least one), and is told what became of the choice."""

    uses_prefixes: bool
    """Whether requests must come with their pieces."""

    def choose(self, request: RequestView, engines: Sequence[EngineView]) -> Choice:
        """Return the engine for a request."""

    def explain(self, request: RequestView, engines: Sequence[EngineView]) -> tuple[Score, ...]:
        """Return how each engine looks to a request, in their order. For people: it takes longer than `choose`."""

    def sent(self, request: RequestView, engine: EngineView, rank: int | None = None) -> None:
        """Note that the engine, or that data rank of it, has taken the request."""

    def lost(self, engine_id: str) -> None:
        """Note that an engine's cache is gone: it left or began anew."""
