"""The order in which a prompt's blocks travel: by their index and, of several KV groups, by group.

prefix of 6 blocks        0    1    2    3    4    5
group 0, which sees all   0    1    2    3    4    6     places in the stream
group 1, with a window                        5    7

Both ends know the prompt's length and the windows, so a place says which block is meant. Of a window there is only what
the tokens after the prefix can see.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_protocol.kv_blob import KvShape

from pagefleet_kv.port import BlockRun


class BlockStream:
    """All blocks that a prompt's decode engine may want: those before its last token."""

    def __init__(self, shape: KvShape, num_prompt_tokens: int) -> None:
        self.num_blocks = (num_prompt_tokens - 1) // shape.block_size
        """Of the prefix."""
        self._starts = [shape.needed_from(group, self.num_blocks) for group in range(len(shape.windows))]

    def wanted(self, runs: Sequence[BlockRun]) -> list[BlockRun]:
        """Return those of the blocks that are in it."""
        parts = [run.since(self._starts[run.group]).until(self.num_blocks) for run in runs]
        return [run for run in parts if run.blocks]

    def merged(self, runs: Sequence[BlockRun]) -> BlockRun | None:
        """Return blocks as one run in the stream, `first` being a place in it; it ends before the first one missing.

        None: none of them is in it.
        """
        parts = self.wanted(runs)
        indexed = sorted(
            (index, run.group, block, content)
            for run in parts
            for index, block, content in zip(
                range(run.first, run.first + len(run.blocks)), run.blocks, run.hashes, strict=True
            )
        )
        if not indexed:
            return None
        first = self._place(indexed[0][0], indexed[0][1])
        follow = [one for place, one in enumerate(indexed, first) if self._place(one[0], one[1]) == place]
        return BlockRun(first, tuple(block for _, _, block, _ in follow), tuple(content for *_, content in follow))

    def _place(self, index: int, group: int) -> int:
        before = sum(max(0, index - start) for start in self._starts)
        return before + sum(start <= index for start in self._starts[:group])
