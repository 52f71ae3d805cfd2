"""Which graph a step runs as. A pure decision: two look-ups by token count."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_engine.worker.graphs.descriptor import BatchDescriptor
from pagefleet_engine.worker.graphs.modes import GraphMode

GraphKey = tuple[GraphMode, BatchDescriptor]
"""FULL or PIECEWISE, and what was captured; NONE with the step's own sizes where nothing fits."""


class GraphDispatcher:
    """Knows every graph there is, and the smallest that serves a step."""

    def __init__(
        self, mode: GraphMode, sizes: Sequence[int], max_num_seqs: int, mixed_sizes: Sequence[int] | None = None
    ) -> None:
        """`sizes`: token counts to capture, for steps that compute prompts only `mixed_sizes` if given;
        `max_num_seqs`: rows of the largest step."""
        mixed_sizes = sizes if mixed_sizes is None else mixed_sizes
        self._decode = _by_num_tokens(_decode_keys(mode, sizes, max_num_seqs))
        self._mixed = _by_num_tokens(_mixed_keys(mode.for_mixed, mixed_sizes, max_num_seqs))
        self._cascade = self._mixed if mode.for_mixed is GraphMode.PIECEWISE else []

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every graph to capture, largest token count first: the smaller then fit into the memory of the first."""
        keys = {key for table in (self._decode, self._mixed) for key in table}
        return tuple(sorted(keys, key=lambda key: (-key[1].num_tokens, key[0].value, key[1].uniform)))

    def dispatch(self, num_tokens: int, num_rows: int, max_query_len: int, cascade: bool = False) -> GraphKey:
        """How to run a step of these sizes, and the sizes to pad it to.

        `cascade`: attention computes a shared prefix apart; how long it is changes the launch, so attention cannot be
        part of a graph.
        """
        uniform = max_query_len == 1 and num_tokens == num_rows
        table = self._mixed if not uniform else self._decode
        if cascade:
            table = self._cascade
        if num_tokens < len(table):
            return table[num_tokens]
        return GraphMode.NONE, BatchDescriptor(num_tokens, num_rows, uniform)


def _decode_keys(mode: GraphMode, sizes: Sequence[int], max_num_seqs: int) -> list[GraphKey]:
    if mode.for_decode is not GraphMode.FULL:
        return _mixed_keys(mode.for_decode, sizes, max_num_seqs)
    counts = sorted({min(size, max_num_seqs) for size in sizes})
    return [(GraphMode.FULL, BatchDescriptor(count, count, uniform=True)) for count in counts]


def _mixed_keys(mode: GraphMode, sizes: Sequence[int], max_num_seqs: int) -> list[GraphKey]:
    match mode:
        case GraphMode.PIECEWISE:
            return [(mode, BatchDescriptor(size, None, uniform=False)) for size in sorted(sizes)]
        case GraphMode.FULL:
            # Each row has a token at least, so there are never more rows than tokens.
            return [(mode, BatchDescriptor(size, min(size, max_num_seqs), uniform=False)) for size in sorted(sizes)]
        case _:
            return []


def _by_num_tokens(keys: list[GraphKey]) -> list[GraphKey]:
    """Entry n: the smallest key for n tokens. Ends with the largest; entry 0 is never asked for."""
    table: list[GraphKey] = []
    for key in keys:
        table += [key] * (key[1].num_tokens + 1 - len(table))
    return table
