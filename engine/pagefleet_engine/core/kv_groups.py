"""Which layers share block tables: one group or more of those that see the whole context, and of each window.

Every block of the pool has one size: it holds `layers_per_block` layers of one group, and belongs to one group at a
time. So layers with a window need not hold what is out of it, and still draw on the same pool as the others.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

MAX_GROUPS = 8
"""Each group costs a block table per request and a slot mapping per step."""

REFERENCE_WINDOWS = 8
"""Padding is weighed for a context of so many times the largest window: in full layers it costs the more for it."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose K/V of one token lies in the same block."""

    layers: tuple[int, ...]
    window: int | None
    """Tokens that each token sees at most, itself included; None for all. A layer's own window may be smaller."""
    chunked: bool = False
    """The window is a chunk: tokens see what is of their own, from its start."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """All layers of a model, each in one group."""

    groups: tuple[KVGroup, ...]
    layers_per_block: int
    """At least the number of layers of the largest group; the rest of a smaller group's block is not used."""

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def padding_share(self) -> float:
        """Share of the places for layers, over one block of each group, that no layer uses."""
        return 1.0 - sum(len(group.layers) for group in self.groups) / (len(self.groups) * self.layers_per_block)

    def of_layers(self, layers: range) -> KVGroups:
        """The same for a stage of the model that has these layers, which count from 0 there: as many tables, less in a
        block."""
        own = [
            replace(group, layers=tuple(layer - layers.start for layer in group.layers if layer in layers))
            for group in self.groups
        ]
        return KVGroups(tuple(own), max(len(group.layers) for group in own))

    def place(self, layer: int) -> tuple[int, int]:
        """The layer's group, and its index within that group's blocks.

        Raises:
            IndexError: no group has this layer.
        """
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise IndexError(f"layer {layer} is in no group")


def stage_slots(groups: KVGroups, stages: Sequence[range]) -> list[range]:
    """Return each stage's places for layers in a block of the model, which is their blocks one after the other.

    Of a single group these are its layers; where there are several, a group has the first of them in each stage.
    """
    sizes = [groups.of_layers(layers).layers_per_block for layers in stages]
    ends = list(itertools.accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def group_layers(windows: Sequence[int | None], *, chunked: bool = False) -> KVGroups:
    """Group layers by their windows (one per layer; None: sees everything), so that little of a block is padding.

    `chunked`: windows are chunks, all of one size. Groups that see everything come first, then by falling window. There
    are at most MAX_GROUPS.

    Raises:
        ValueError: there are no layers, a window sees nothing, or chunks differ.
    """
    if not windows or any(window is not None and window < 1 for window in windows):
        raise ValueError("layers have windows of at least one token, and there is at least one layer")
    if chunked and len({*windows} - {None}) > 1:
        raise ValueError("chunks of several sizes have no common start")
    held = _held_windows(windows)
    kinds = sorted(set(held), key=lambda window: window or math.inf, reverse=True)
    size = _choose_layers_per_block(Counter(held))
    groups = []
    for kind in kinds:
        layers = [layer for layer, window in enumerate(held) if window == kind]
        of_chunks = chunked and kind is not None
        groups += [
            KVGroup(tuple(layers[start : start + size]), kind, of_chunks) for start in range(0, len(layers), size)
        ]
    return KVGroups(tuple(groups), size)


def _held_windows(windows: Sequence[int | None]) -> list[int | None]:
    """What each layer keeps: its window, or the next larger one where there are too many different ones."""
    held = list(windows)
    while len(set(held)) > MAX_GROUPS:
        smallest, larger = sorted(window for window in set(held) if window is not None)[:2]
        held = [larger if window == smallest else window for window in held]
    return held


def _choose_layers_per_block(counts: Counter[int | None]) -> int:
    """Take the size that costs a long request the least; of equals the one with the fewest groups."""
    context = REFERENCE_WINDOWS * max((window for window in counts if window is not None), default=1)
    costs = []
    for size in range(1, max(counts.values()) + 1):
        num_groups = {window: -(-count // size) for window, count in counts.items()}
        if sum(num_groups.values()) <= MAX_GROUPS:
            cost = size * sum(number * (window or context) for window, number in num_groups.items())
            costs.append((cost, sum(num_groups.values()), size))
    return min(costs)[2]


UNBOUNDED_TOKENS = 2**31 - 1
"""Where every layer has a window, the pool does not limit a request's length; positions are 32-bit numbers."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens from the start of a block."""
    return -(-num_tokens // block_size)


def most_window_blocks(window: int, chunk: int, block_size: int) -> int:
    """Blocks that a window group holds at most while `chunk` tokens are computed, wherever they begin."""
    return num_blocks_for(window - 1 + chunk - 1, block_size) + 1


def blocks_for_request(groups: KVGroups, num_tokens: int, block_size: int, chunk: int) -> int:
    """Blocks that a request of `num_tokens` holds at most at one time, over all groups.

    `chunk`: most tokens of it in one step, the token budget of a step.
    """
    num_blocks = num_blocks_for(num_tokens, block_size)
    return sum(
        num_blocks if group.window is None else min(num_blocks, most_window_blocks(group.window, chunk, block_size))
        for group in groups.groups
    )


def longest_request(groups: KVGroups, num_blocks: int, block_size: int, chunk: int) -> int:
    """Tokens of the longest request that `num_blocks` hold; UNBOUNDED_TOKENS where windows bound what it needs."""
    lower, upper = 0, num_blocks + 1  # in blocks of one group: a request of `lower` fits, one of `upper` does not
    if blocks_for_request(groups, upper * block_size, block_size, chunk) <= num_blocks:
        return UNBOUNDED_TOKENS
    while upper - lower > 1:
        middle = (lower + upper) // 2
        if blocks_for_request(groups, middle * block_size, block_size, chunk) <= num_blocks:
            lower = middle
        else:
            upper = middle
    return lower * block_size
