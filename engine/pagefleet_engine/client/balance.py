"""Which data rank gets a prompt. Pure: it knows what it gave each rank, and what of that has ended.

A prompt costs a rank the tokens that it has to compute, after those that wait there already; and every output that is
open there takes a share of each step. All of it is counted in tokens, and the cheapest rank gets the prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet_protocol.block_hash import BlockHash, PrefixScope, extend_hashes, root_hash

OUTPUT_TOKENS = 256
"""What an open output counts for: a prefix that is shorter is not worth waiting behind one more."""
RECOMPUTE = 4
"""What a token counts for that a rank does not have yet: it is computed, and takes K/V of others from then on. In
`bench/rank_balance.py` 1 computes prefixes again and again where K/V is short."""
WAIT = 4
"""What a token counts for that a rank has no place for, as others have to end first."""
PIECE = 64
"""Tokens by which prefixes are compared: shorter ones decide nothing, and hashing block by block takes its time."""


@dataclass(frozen=True, slots=True)
class RankRoom:
    """What one rank holds at once."""

    requests: int
    tokens: int
    """Of K/V."""
    queued: int = 4096
    """Requests that may wait for a place: one more is refused."""


@dataclass(slots=True)
class RankLoad:
    """What a rank has been given and has not ended."""

    room: RankRoom
    outputs: int = 0
    held_tokens: int = 0
    """K/V of its own that they take, or will."""
    prefill_tokens: int = 0
    """Uncached tokens of prompts that no output has come of yet."""
    chosen_at: int = 0
    """Number of the last prompt that it got."""

    def is_full(self, outputs: int) -> bool:
        """Whether a prompt with so many outputs would be refused here."""
        return self.outputs + outputs > self.room.requests + self.room.queued

    def cost(self, new: int, outputs: int) -> int:
        """Return what a prompt would cost here, in tokens.

        Args:
            new: tokens of it that are not cached here.
            outputs: it has.
        """
        taken = new + outputs * OUTPUT_TOKENS
        late = max(0, self.outputs + outputs - self.room.requests) * OUTPUT_TOKENS
        late += max(0, self.held_tokens + taken - self.room.tokens)
        return self.prefill_tokens + RECOMPUTE * new + OUTPUT_TOKENS * self.outputs + WAIT * late


class SentPrefixes:
    """Beginnings of prompts that a rank was sent, as far as its cache can still hold them.

    Args:
        capacity: tokens of the cache.
    """

    def __init__(self, capacity: int) -> None:
        self._most = max(1, capacity // PIECE)
        self._pieces: OrderedDict[BlockHash, None] = OrderedDict()

    def find(self, pieces: Sequence[BlockHash]) -> int:
        """Return how many tokens of a prompt were there before."""
        found = 0
        for piece in pieces:
            if piece not in self._pieces:
                break
            found += PIECE
        return found

    def add(self, pieces: Sequence[BlockHash]) -> None:
        """Note a prompt. What was not used for longest is forgotten, the ends of prompts before their beginnings."""
        for piece in reversed(pieces):
            self._pieces[piece] = None
            self._pieces.move_to_end(piece)
        while len(self._pieces) > self._most:
            self._pieces.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        self._pieces.clear()


@dataclass(slots=True)
class Seat:
    """A prompt's place at a rank. Its outputs leave one by one."""

    rank: int
    load: RankLoad = field(repr=False)
    outputs: int
    held_tokens: int
    """For each output."""
    prefill_tokens: int

    def has_begun(self) -> None:
        """Its prompt is computed, or will never be."""
        self.load.prefill_tokens -= self.prefill_tokens
        self.prefill_tokens = 0

    def leave(self) -> None:
        """One of its outputs has ended."""
        self.outputs -= 1
        self.load.outputs -= 1
        self.load.held_tokens -= self.held_tokens
        if not self.outputs:
            self.has_begun()


class Balance:
    """Gives prompts to ranks.

    Args:
        rooms: of each rank.
        prefix_caching: whether the ranks keep the K/V of prompts.
    """

    def __init__(self, rooms: Sequence[RankRoom], *, prefix_caching: bool = True) -> None:
        self.loads = [RankLoad(room) for room in rooms]
        self._sent = [SentPrefixes(room.tokens) for room in rooms]
        self._compares = prefix_caching and len(rooms) > 1
        self._number = 0

    def place(self, prompt: Sequence[int], outputs: int, scope: PrefixScope, rank: int | None = None) -> Seat:
        """Give a prompt to the rank that takes it where it costs least; of equals, to who waited longest for one.

        Args:
            prompt: its tokens.
            outputs: how many it has.
            scope: what has to be equal for K/V to be shared.
            rank: that gets it, whatever it costs.
        """
        pieces: list[BlockHash] = []
        if self._compares:
            extend_hashes(pieces, root_hash(scope), prompt, PIECE)
        new = [len(prompt) - sent.find(pieces) for sent in self._sent]
        if rank is None:
            costs = [
                (load.is_full(outputs), load.cost(own, outputs), load.chosen_at)
                for load, own in zip(self.loads, new, strict=True)
            ]
            rank = costs.index(min(costs))
        self._sent[rank].add(pieces)
        return self._seat(rank, new[rank], outputs)

    def forget_prefixes(self) -> None:
        """The ranks' caches were emptied."""
        for sent in self._sent:
            sent.clear()

    def _seat(self, rank: int, new: int, outputs: int) -> Seat:
        self._number += 1
        load = self.loads[rank]
        load.chosen_at = self._number
        held_tokens = new // outputs + OUTPUT_TOKENS
        load.outputs += outputs
        load.held_tokens += held_tokens * outputs
        load.prefill_tokens += new
        return Seat(rank, load, outputs, held_tokens, new)
