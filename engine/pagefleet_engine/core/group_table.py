"""One request's blocks in one KV group, and what a kind of group must be able to do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagefleet_protocol.block_hash import BlockHash


@dataclass(frozen=True, slots=True)
class Span:
    """A request around one step, in tokens from its start."""

    computed: int
    """Computed before the step, or found in the cache."""
    end: int
    """Computed after the step."""
    known: int
    """More than `end` while a prompt is computed in chunks."""


@dataclass(slots=True)
class GroupTable:
    """The request's blocks in one group, in order of the tokens they hold."""

    start: int
    """Index of the first block that is held; the ones before it are out of the window."""
    blocks: list[int]
    quota: int = 0
    """Blocks that are held or promised in a group with a window; 0 in a full group, where nothing is promised."""
    unpublished: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Index -> block, and its number of uses: given back before the step that filled it was known to have succeeded."""

    @property
    def end(self) -> int:
        """Index after the last block."""
        return self.start + len(self.blocks)


class LayerGroup(Protocol):
    """The blocks of all requests in one group. Admission goes hold, admit; a step's growth goes slide, grow.

    What admission and growth take is asked for first, over all groups, and compared with `BlockPool.num_available`.
    """

    def taken_by_admission(self, cached: Sequence[int], span: Span) -> int:
        """Blocks that will no more be available when a request with these cached ones is in."""
        ...

    def hold(self, cached: Sequence[int]) -> None:
        """Hold cached blocks, in all groups before any of them takes others."""
        ...

    def admit(self, cached: Sequence[int], span: Span) -> GroupTable:
        """Begin a table with cached blocks, which are held, and those for the first step."""
        ...

    def slide(self, table: GroupTable, num_computed_tokens: int, num_published: int) -> None:
        """Give back what no token from position `num_computed_tokens` on can see."""
        ...

    def taken_by_growth(self, table: GroupTable, span: Span) -> int:
        """Blocks that will no more be available when the table has grown; negative when it needs fewer than it had."""
        ...

    def grow(self, table: GroupTable, span: Span) -> list[int]:
        """Make room for the step; returns the added blocks."""
        ...

    def publish(self, table: GroupTable, hashes: Sequence[BlockHash], first: int, last: int) -> None:
        """Make the computed blocks `first` to `last` (excluded) findable, as far as they still hold what they held."""
        ...

    def forget(self, table: GroupTable, hashes: Sequence[BlockHash]) -> None:
        """Make unfindable whatever the request has held, or whatever block its hashes name."""
        ...

    def release(self, table: GroupTable) -> None:
        """Give everything back."""
        ...
