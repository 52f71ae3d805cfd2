"""How much of the prompts the prefix cache had, and why not the rest. It costs a look per request and per block lost.

prompt          |<- found ->|<- missed, for one reason ->|<- short ->|
blocks          |     |     |      |      |       |      |    a part of one, or the token that is always computed
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

from pagefleet_protocol.block_hash import BlockHash

from pagefleet_engine.core.block_pool import BlockPool
from pagefleet_engine.core.cache_events import CacheEvents
from pagefleet_engine.core.request import Request

MISS_REASONS = ("new", "evicted", "salt", "short")
"""`new`: nobody has asked it before, as far as is remembered; `evicted`: it was cached once; `salt`: another tenant's
or adapter's prompt begins alike; `short`: no full block."""
_REMEMBERED = 65_536
_NEW, _EVICTED, _SALT, _SHORT = range(len(MISS_REASONS))
_Key = TypeVar("_Key", bound=Hashable)


class PrefixLookups:
    """Totals of the first lookup of each request. Hears what leaves the cache, as `CacheEvents`, and passes it on.

    Attributes:
        queried_tokens: of the requests that were looked up.
        hit_tokens: of those, found.
        missed_tokens: the others, in the order of `MISS_REASONS`.
    """

    def __init__(self, block_size: int, listener: CacheEvents | None) -> None:
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.missed_tokens = [0] * len(MISS_REASONS)
        self._block_size = block_size
        self._listener = listener
        self._lost: dict[BlockHash, None] = {}
        self._beginnings: dict[int, BlockHash] = {}
        """Hash of a first block's tokens -> root of the prompt that had it last."""

    def note(self, request: Request, num_cached: int, pool: BlockPool) -> None:
        """Count a request that was just admitted with `num_cached` tokens from the cache."""
        given, size = request.num_given_tokens, self._block_size
        self.queried_tokens += given
        self.hit_tokens += num_cached
        findable = (given - 1) // size * size
        self.missed_tokens[_SHORT] += given - max(findable, num_cached)
        if findable:
            beginning = hash(tuple(request.token_ids[:size]))
            if num_cached < findable:
                content = request.block_hashes[num_cached // size]
                was_there = content in self._lost or pool.find(content) is not None  # in one group of several
                last = request.prefix_root if num_cached else self._beginnings.get(beginning, request.prefix_root)
                reason = _EVICTED if was_there else _NEW if last == request.prefix_root else _SALT
                self.missed_tokens[reason] += findable - num_cached
            self._beginnings[beginning] = request.prefix_root
            _forget_oldest(self._beginnings)

    def stored(self, contents: Sequence[BlockHash]) -> None:
        """See CacheEvents."""
        if self._listener is not None:
            self._listener.stored(contents)

    def removed(self, contents: Sequence[BlockHash]) -> None:
        """See CacheEvents."""
        self._lost.update(dict.fromkeys(contents))
        _forget_oldest(self._lost)
        if self._listener is not None:
            self._listener.removed(contents)

    def cleared(self) -> None:
        """See CacheEvents."""
        self._lost.clear()
        self._beginnings.clear()
        if self._listener is not None:
            self._listener.cleared()


def _forget_oldest(remembered: dict[_Key, Any]) -> None:
    """Halve what has grown too large, which is rare."""
    if len(remembered) > 2 * _REMEMBERED:
        for key in list(remembered)[:_REMEMBERED]:
            del remembered[key]
