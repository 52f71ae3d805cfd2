"""Which data rank gets a prompt. Pure: it knows what it gave each rank, and what of that has ended.

A prompt costs a rank the tokens that it has to compute, after those that wait there already; and every output that is
open there takes a share of each step. All of it is counted in tokens, and the cheapest rank gets the prompt. Where
several processes give prompts to the same ranks, each sees what all have given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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


NUM_COUNTS = 3


class Counts(Protocol):
    """Numbers that may be in memory which processes share."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def __getitem__(self, place: int, /) -> int: ...

    def __setitem__(self, place: int, value: int, /) -> None: ...


@dataclass(slots=True)
class RankLoad:
    """What a rank has been given and has not ended."""

    room: RankRoom
    rows: Sequence[Counts] = field(default_factory=lambda: [[0] * NUM_COUNTS])
    """What each process has given it: outputs, the K/V that they take or will, uncached tokens of prompts."""
    own: int = 0
    """Which of them is this one's."""
    chosen_at: int = 0
    """Number of the last prompt that it got from here."""

    @property
    def outputs(self) -> int:
        """That are open."""
        return sum(row[0] for row in self.rows)

    @property
    def held_tokens(self) -> int:
        """K/V of its own that they take, or will."""
        return sum(row[1] for row in self.rows)

    @property
    def prefill_tokens(self) -> int:
        """Uncached tokens of prompts that no output has come of yet."""
        return sum(row[2] for row in self.rows)

    def add(self, outputs: int, held_tokens: int, prefill_tokens: int) -> None:
        """Note what this process gives, or what of that has ended."""
        row = self.rows[self.own]
        row[0] += outputs
        row[1] += held_tokens
        row[2] += prefill_tokens

    def is_full(self, outputs: int) -> bool:
        """Whether a prompt with so many outputs would be refused here."""
        return self.outputs + outputs > self.room.requests + self.room.queued

    def cost(self, new: int, outputs: int) -> int:
        """Return what a prompt would cost here, in tokens.

        Args:
            new: tokens of it that are not cached here.
            outputs: it has.
        """
        taken, num_open = new + outputs * OUTPUT_TOKENS, self.outputs
        late = max(0, num_open + outputs - self.room.requests) * OUTPUT_TOKENS
        late += max(0, self.held_tokens + taken - self.room.tokens)
        return self.prefill_tokens + RECOMPUTE * new + OUTPUT_TOKENS * num_open + WAIT * late


class Prefixes(Protocol):
    """Beginnings of prompts that a rank was sent, as far as its cache can still hold them."""

    def find(self, pieces: Sequence[BlockHash]) -> int:
        """Return how many tokens of a prompt were there before."""
        ...

    def add(self, pieces: Sequence[BlockHash]) -> None:
        """Note a prompt."""
        ...

    def clear(self) -> None:
        """Forget all."""
        ...


def num_pieces(capacity: int) -> int:
    """Return how many pieces of prompts a cache of so many tokens holds."""
    return max(1, capacity // PIECE)


class SentPrefixes:
    """Implements `Prefixes` of one process.

    Args:
        capacity: tokens of the cache.
    """

    def __init__(self, capacity: int) -> None:
        self._most = num_pieces(capacity)
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
        if self.prefill_tokens:
            self.load.add(0, 0, -self.prefill_tokens)
            self.prefill_tokens = 0

    def leave(self) -> None:
        """One of its outputs has ended."""
        self.outputs -= 1
        self.load.add(-1, -self.held_tokens, 0)
        if not self.outputs:
            self.has_begun()


class Notebook(Protocol):
    """Where processes that give prompts to the same ranks note what they gave."""

    def load(self, rank: int, room: RankRoom) -> RankLoad:
        """Return the load of a rank by all of them."""
        ...

    def prefixes(self, rank: int, room: RankRoom) -> Prefixes:
        """Return the beginnings that any of them sent to a rank."""
        ...


class OwnNotebook:
    """Implements `Notebook` of a process that is alone."""

    def load(self, rank: int, room: RankRoom) -> RankLoad:
        """See Notebook."""
        return RankLoad(room)

    def prefixes(self, rank: int, room: RankRoom) -> Prefixes:
        """See Notebook."""
        return SentPrefixes(room.tokens)


class Balance:
    """Gives prompts to ranks.

    Args:
        rooms: of each rank.
        prefix_caching: whether the ranks keep the K/V of prompts.
        notebook: of this process and others that give prompts to these ranks.
    """

    def __init__(
        self, rooms: Sequence[RankRoom], *, prefix_caching: bool = True, notebook: Notebook | None = None
    ) -> None:
        notes = notebook or OwnNotebook()
        self.loads = [notes.load(rank, room) for rank, room in enumerate(rooms)]
        self._sent = [notes.prefixes(rank, room) for rank, room in enumerate(rooms)]
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
        load.add(outputs, held_tokens * outputs, new)
        return Seat(rank, load, outputs, held_tokens, new)
