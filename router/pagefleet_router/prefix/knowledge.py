"""What is known of the engines' prefix caches, behind one interface: exact where engines tell, guessed where not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.prefix.exact import ExactIndex
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.request_view import Pieces, RequestView

BYTES_PER_TOKEN = 4
"""Of English text and common vocabularies: for estimates where nobody has tokenized."""


class PrefixKnowledge(Protocol):
    """Answers how much of a prompt each engine has cached."""

    def cached_tokens(self, engines: Sequence[EngineView], request: RequestView) -> list[int]:
        """Return, for each engine, the leading prompt tokens that it has probably cached; of several caches, in the one
        that has most, as the engine chooses it for them."""

    def cached_by_rank(self, engine: EngineView, request: RequestView) -> list[int]:
        """Return the same of each data rank of an engine."""

    def sent(self, engine: EngineView, request: RequestView, rank: int | None = None) -> None:
        """Note that an engine is given a request, whose prompt it will have cached soon, in the named rank."""

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
        most = request.num_tokens - 1 if request.num_tokens else len(pieces) * per_piece
        return [min(most, self._index.match(engine.id, pieces) * per_piece) for engine in engines]

    def cached_by_rank(self, engine: EngineView, request: RequestView) -> list[int]:
        """See PrefixKnowledge: which rank has it is known to nobody."""
        return self.cached_tokens((engine,), request) * len(engine.cache_ids)

    def sent(self, engine: EngineView, request: RequestView, rank: int | None = None) -> None:
        """See PrefixKnowledge."""
        if request.pieces:
            self._index.record(engine.id, request.pieces)

    def lost(self, engine_id: str) -> None:
        """See PrefixKnowledge."""
        self._index.forget(engine_id)


class PrefixBook:
    """What the engines say where they say it, and a guess where not.

    An engine's own word counts when all of its events up to now are applied, and the request's blocks were hashed as
    it hashes them. What is sent is noted in both: a prompt may come again without blocks, and an engine fall silent.

    Args:
        guess: knows every engine.
        exact: knows those that publish events.
    """

    def __init__(self, guess: PrefixKnowledge, exact: ExactIndex) -> None:
        self._guess = guess
        self._exact = exact
        self._live: set[str] = set()

    @property
    def num_live(self) -> int:
        """How many caches the exact index has all of."""
        return len(self._live)

    def set_live(self, cache_id: str, is_live: bool) -> None:
        """Note whether the exact index has all that a cache has."""
        if is_live:
            self._live.add(cache_id)
        else:
            self._live.discard(cache_id)

    def cached_tokens(self, engines: Sequence[EngineView], request: RequestView) -> list[int]:
        """See PrefixKnowledge."""
        blocks, size = request.blocks, request.block_size
        if not blocks or not self._live:
            return self._guess.cached_tokens(engines, request)
        told = [self._tells(engine, request) for engine in engines]
        most = (request.num_tokens - 1) // size  # an engine computes the last token whatever it has
        asked = [one.cache_ids for one, tells in zip(engines, told, strict=True) if tells]
        matched = iter(self._exact.match([name for names in asked for name in names], blocks))
        lengths = iter([max(itertools.islice(matched, len(names))) for names in asked])
        if all(told):
            return [min(length, most) * size for length in lengths]
        guessed = self._guess.cached_tokens(engines, request)
        return [min(next(lengths), most) * size if tells else guess for tells, guess in zip(told, guessed, strict=True)]

    def cached_by_rank(self, engine: EngineView, request: RequestView) -> list[int]:
        """See PrefixKnowledge."""
        if not request.blocks or not self._tells(engine, request):
            return self._guess.cached_by_rank(engine, request)
        most = (request.num_tokens - 1) // request.block_size
        return [min(one, most) * request.block_size for one in self._exact.match(engine.cache_ids, request.blocks)]

    def sent(self, engine: EngineView, request: RequestView, rank: int | None = None) -> None:
        """See PrefixKnowledge. Where the engine chooses the rank each counts as having it, until events come."""
        self._guess.sent(engine, request)
        if request.blocks:
            names = engine.cache_ids
            for name in names if rank is None else names[rank : rank + 1]:
                self._exact.sent(name, request.blocks)

    def lost(self, engine_id: str) -> None:
        """See PrefixKnowledge. The exact index hears it from the engine, whose incarnation is another then."""
        self._guess.lost(engine_id)

    def _tells(self, engine: EngineView, request: RequestView) -> bool:
        facts = engine.facts
        return (
            facts is not None
            and self._live.issuperset(engine.cache_ids)
            and (facts.scope, facts.block_size) == (request.scope, request.block_size)
        )


# A prompt as a chain of hashes: one for each full piece of 512 bytes, covering everything before it.
# The text is the JSON of `messages` or `prompt` as the client wrote it: a growing conversation keeps its beginning, and
# nothing has to be decoded. Hashes are CPython's keyed SipHash: fast, unpredictable for clients, different in every
# process. They choose an engine and decide nothing else, so 64 bits are enough.
PIECE_BYTES = 512
MAX_PIECES = 1024
"""512 kB are looked at; what differs only beyond shares its place."""


def hash_pieces(scope: tuple[object, ...], text: bytes) -> Pieces:
    """Return the chain of `text`.

    Args:
        scope: what must be equal for two requests to share a prefix: model, tenant, salt, tools.
        text: the prompt's bytes.
    """
    parent = hash(scope)
    pieces = []
    for start in range(0, min(len(text), PIECE_BYTES * MAX_PIECES) - PIECE_BYTES + 1, PIECE_BYTES):
        parent = hash((parent, text[start : start + PIECE_BYTES]))
        pieces.append(parent)
    return tuple(pieces)
