"""Steps that are computed as two halves, of which one computes while the other's tokens travel between ranks: which
they are, and where they are cut. Pure. After vLLM's dual batch overlap and DeepSeek's two micro-batches (arXiv
2412.19437, section 3.2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_engine.core.step import Int64Array

_NEAR = 16
"""A row's end is as good as the middle where it is no further away than this part of all tokens: to cut a row is to
gather its keys and values twice."""


@dataclass(frozen=True, slots=True)
class DualBatch:
    """From how many tokens on a rank would divide its step. It is divided where all ranks would."""

    decode_token_threshold: int
    prefill_token_threshold: int

    def divides(self, new: Int64Array) -> bool:
        """Whether a step is large enough, by the new tokens of each row; one token cannot be divided."""
        num_tokens, num_rows = int(new.sum()), len(new)
        only_decodes = num_tokens == num_rows
        threshold = self.decode_token_threshold if only_decodes else self.prefill_token_threshold
        return num_tokens >= max(2, threshold)


@dataclass(frozen=True, slots=True)
class Half:
    """Consecutive tokens of a step."""

    rows: range
    """That have some of them; the row in the middle may have some in each half."""
    tokens: range


def halves(new: Int64Array) -> tuple[Half, Half]:
    """Cut a step of two tokens at least: at a row's end where one is near the middle, else within a row.

    What the second half has of a row follows what the first has, so that half must have written its keys before.
    """
    ends = new.cumsum()
    num_tokens = int(ends[-1])
    cut = num_tokens // 2
    nearest = int(ends[abs(ends - cut).argmin()])
    if nearest < num_tokens and abs(nearest - cut) <= num_tokens // _NEAR:
        cut = nearest
    ended = int(ends.searchsorted(cut, "right"))
    begun = int(ends.searchsorted(cut, "left")) + 1
    return Half(range(begun), range(cut)), Half(range(ended, len(new)), range(cut, num_tokens))
