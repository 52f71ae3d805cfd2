"""Which graphs there are, and which of them a step runs as: two look-ups by token count. Pure decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagefleet_engine.core.step import CommonStep
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.worker.graphs.modes import GraphMode

LARGEST_BY_DEFAULT = 512
"""A larger step computes for longer than the host takes to launch it. More running requests than this extend it."""


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """What a graph was captured for: sizes of a step, padding included."""

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

    def dispatch_common(self, step: CommonStep) -> GraphKey:
        """How each of several copies that step together runs its part of a step, which may be empty: the same for all,
        as graphs of one size exchange as much."""
        longest = 1 if step.is_uniform else 2
        return self.dispatch(step.num_tokens, step.num_tokens, longest, step.is_cascade)


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
    """Entry n: the smallest key for n tokens. Ends with the largest."""
    table: list[GraphKey] = []
    for key in keys:
        table += [key] * (key[1].num_tokens + 1 - len(table))
    return table


def default_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Ascending sizes: 1, 2, 4, by 8 to 256, by 16 to 512, by 64 beyond.

    They end at twice `max_num_seqs` or at 512, whichever is less, but never under `max_num_seqs` (so that a step of
    decoding always finds a graph) nor over `max_num_batched_tokens`.
    """
    largest = max(max_num_seqs, min(2 * max_num_seqs, LARGEST_BY_DEFAULT))
    largest = min(largest, max_num_batched_tokens)
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, largest + 1, 64)]
    ends = {largest, min(max_num_seqs, largest)}
    return tuple(sorted({size for size in steps if size <= largest} | ends))


def parse_sizes(setting: str, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Ascending sizes of a setting like "1,2,4,8".

    Raises:
        ConfigError: not a list of whole numbers from 1 to `max_num_batched_tokens`.
    """
    sizes: set[int] = set()
    for part in setting.split(","):
        text = part.strip()
        if not (text.isascii() and text.isdigit()):
            raise ConfigError(f"cuda_graph_sizes has {text!r}: give token counts with commas between, like 1,2,4,8")
        size = int(text)
        if not 1 <= size <= max_num_batched_tokens:
            raise ConfigError(
                f"cuda_graph_sizes has {size}: a step has 1 to {max_num_batched_tokens} tokens (max_num_batched_tokens)"
            )
        sizes.add(size)
    return tuple(sorted(sizes))


def resolve_sizes(setting: str | None, max_num_seqs: int, max_num_batched_tokens: int) -> Sequence[int]:
    """The setting's sizes, or the default for these limits.

    Raises:
        ConfigError: see `parse_sizes`.
    """
    if setting is None:
        return default_sizes(max_num_seqs, max_num_batched_tokens)
    return parse_sizes(setting, max_num_batched_tokens)


def coarser(sizes: Sequence[int]) -> tuple[int, ...]:
    """Ascending sizes of which each is at least a quarter larger than the one before, with the largest.

    For piecewise graphs: one of them costs as much to capture as dozens of full ones, and a step that computes prompts
    hardly takes longer for some padding.
    """
    kept: list[int] = []
    for size in sorted(sizes, reverse=True):
        if not kept or 5 * size <= 4 * kept[-1]:
            kept.append(size)
    return tuple(reversed(kept))
