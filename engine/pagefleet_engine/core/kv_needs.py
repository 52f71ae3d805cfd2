"""How many blocks a request needs: arithmetic over groups, no state.

    position        first(c)                c                    c + chunk
    window group       |<- window - 1, read ->|<- chunk, written ->|      blocks outside of this are not held
    full group   |<-------------------- every block ------------------------------------------------>|

A group with a window holds the most blocks while a prompt is computed in chunks; the answer needs one token at a time.
"""

from __future__ import annotations

from pagefleet_engine.core.kv_groups import KVGroups

UNBOUNDED_TOKENS = 2**31 - 1
"""Where every layer has a window, the pool does not limit a request's length; positions are 32-bit numbers."""


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens from the start of a block."""
    return -(-num_tokens // block_size)


def first_needed_block(num_computed_tokens: int, window: int, block_size: int) -> int:
    """The first block that tokens from position `num_computed_tokens` on can see."""
    return max(0, num_computed_tokens - window + 1) // block_size


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
