"""Which token counts get a graph of their own; a step is padded to the next one."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_engine.errors import ConfigError

LARGEST_BY_DEFAULT = 512
"""A larger step computes for longer than the host takes to launch it. More running requests than this extend it."""


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
