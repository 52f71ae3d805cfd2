"""The longest prefix that a store has enough of, in every KV group."""

from __future__ import annotations

from collections.abc import Callable

from pagefleet_protocol.kv_blob import KvShape


def longest_prefix(shape: KvShape, first: int, limit: int, has: Callable[[int, int], bool]) -> int:
    """Return how many blocks the prefix has that can be had, at most `limit`; `first` if it is no longer than that.

    Args:
        shape: of the blocks.
        first: blocks of the prefix that are there already, in every group as far as they are needed.
        limit: blocks of the longest prefix that is of use.
        has: whether the store has a group's block, by both numbers.
    """
    longest = first
    since = [first] * len(shape.windows)
    """From where on each group has all blocks so far."""
    for index in range(first, limit):
        for group, window in enumerate(shape.windows):
            if not has(group, index):
                if window is None:
                    return longest
                since[group] = index + 1
        if all(begin <= max(first, shape.needed_from(group, index + 1)) for group, begin in enumerate(since)):
            longest = index + 1
    return longest
