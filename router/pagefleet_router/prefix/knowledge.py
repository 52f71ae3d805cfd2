"""What is known of the engines' prefix caches, behind one interface: exact where engines tell, guessed where not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagefleet_router.endpoints import EngineView
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.pieces import PIECE_BYTES
from pagefleet_router.request_view import RequestView

BYTES_PER_TOKEN = 4
"""Of English text and common vocabularies: for estimates where nobody has tokenized."""


class PrefixKnowledge(Protocol):
    """Answers how much of a prompt each engine has cached."""

    def cached_tokens(self, engines: Sequence[EngineView], request: RequestView) -> list[int]:
        """Return, for each engine, the leading prompt tokens that it has probably cached."""

    def sent(self, engine_id: str, request: RequestView) -> None:
        """Note that an engine is given a request, whose prompt it will have cached soon."""

    def lost(self, engine_id: str) -> None:
        """Note that an engine's cache is gone: it left, or began anew."""


class ApproximatePrefixes:
    """Guesses an engine's cache from the requests that this router gave it."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def cached_tokens(self, engines: Sequence[EngineView], request: RequestView) -> list[int]:
        """See PrefixKnowledge."""
        pieces = request.pieces
        if not pieces:
            return [0] * len(engines)
        per_piece = PIECE_BYTES // BYTES_PER_TOKEN
        return [self._index.match(engine.id, pieces) * per_piece for engine in engines]

    def sent(self, engine_id: str, request: RequestView) -> None:
        """See PrefixKnowledge."""
        if request.pieces:
            self._index.record(engine_id, request.pieces)

    def lost(self, engine_id: str) -> None:
        """See PrefixKnowledge."""
        self._index.forget(engine_id)
