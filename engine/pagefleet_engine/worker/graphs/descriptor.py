"""What a graph was captured for: the key by which a batch finds its graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """Sizes of a step, padding included. Hashable; no torch."""

    num_tokens: int
    num_rows: int | None
    """None: the graph does not look at rows, and serves any number of them."""
    uniform: bool
    """Every row has one token."""

    @property
    def max_query_len(self) -> int:
        """The longest query that the step may have."""
        return 1 if self.uniform else self.num_tokens

    def rows_for(self, num_rows: int) -> int:
        """Rows to prepare for a batch of `num_rows`: padded where the graph has a fixed number of them."""
        return num_rows if self.num_rows is None else self.num_rows
