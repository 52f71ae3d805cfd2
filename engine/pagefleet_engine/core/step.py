"""What the scheduler tells the worker in one step, and what comes back: the only types both know.

The plan is a difference: a request's tokens and parameters travel once, when it enters; later steps name it by id. The
worker appends the tokens it samples to its own copy, so they come back only to the other stages of a pipeline; it is
told of those that others found out. Rows whose token depends on a mask are sampled by a second call, when their masks
are known; those for which none comes sit the step out.

    known tokens      |<------------- num_tokens ------------->|
    K/V in pages      |<- num_computed_tokens ->|
    this step         |                         |<-- new -->|        samples only when new reaches num_tokens
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray
from pagefleet_protocol.sampling_params import SamplingParams

Int64Array = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that the worker does not hold: first time, or again after a preemption."""

    request_id: str
    token_ids: Sequence[int]
    """Prompt and the output so far: there is some after a preemption, and where another engine's is resumed."""
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: Sequence[int]
    """Token ids that end the model's answer; masked until `min_tokens` are out."""


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """One request's share of the step. `num_computed_tokens` tokens have their K/V in pages already."""

    request_id: str
    num_computed_tokens: int
    num_new_tokens: int
    new_blocks: Sequence[Sequence[int]]
    """Per KV group: blocks appended to the row's table before the step; for a new row, its whole table (cached blocks
    first; 0 for one that no token will read). Empty when no group gets any."""
    samples: bool
    """True when the step computes the last known token, so that its logits give the next one."""


class ScheduledRows(msgspec.Struct, frozen=True, eq=False, array_like=True):
    """The rows of a step, in batch order: a column of each number, as the worker computes with them and ranks are sent
    them. An object per row and step would cost more than all the rest of a plan."""

    request_ids: Sequence[str]
    computed: Int64Array
    """`num_computed_tokens` of each."""
    new: Int64Array
    """`num_new_tokens` of each."""
    samples: Int64Array
    """1 for rows that sample, 0 for others."""
    new_blocks: Mapping[int, Sequence[Sequence[int]]]
    """Of the rows that get any: index of the row -> see ScheduledRow."""

    @classmethod
    def of(cls, rows: Sequence[ScheduledRow]) -> ScheduledRows:
        """These rows."""
        return cls.of_columns(
            [row.request_id for row in rows],
            [row.num_computed_tokens for row in rows],
            [row.num_new_tokens for row in rows],
            [row.samples for row in rows],
            {index: row.new_blocks for index, row in enumerate(rows) if row.new_blocks},
        )

    @classmethod
    def of_columns(
        cls,
        request_ids: Sequence[str],
        computed: Sequence[int],
        new: Sequence[int],
        samples: Sequence[bool],
        new_blocks: Mapping[int, Sequence[Sequence[int]]],
    ) -> ScheduledRows:
        """Rows of which each number is in a list of its own."""
        int64 = np.int64
        return cls(request_ids, np.array(computed, int64), np.array(new, int64), np.array(samples, int64), new_blocks)

    def __len__(self) -> int:
        return len(self.request_ids)

    def __getitem__(self, index: int) -> ScheduledRow:
        return ScheduledRow(
            self.request_ids[index],
            int(self.computed[index]),
            int(self.new[index]),
            self.new_blocks.get(index, ()),
            bool(self.samples[index]),
        )

    def __iter__(self) -> Iterator[ScheduledRow]:
        return (self[index] for index in range(len(self)))

    def numbers(self) -> Iterator[tuple[int, int, int]]:
        """Per row: tokens that are computed already, new ones, whether it samples."""
        return zip(self.computed.tolist(), self.new.tolist(), self.samples.tolist(), strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonStep:
    """What holds for a step of one data rank, or of all that step together."""

    num_tokens: int
    """Of the rank with the most."""
    is_uniform: bool
    """Every row has one token."""
    is_cascade: bool = False
    """Some rank attends apart to what its rows have in common."""
    in_halves: bool = False
    """It is divided (`core/dual_batch.py`); of one rank: it would be."""

    def numbers(self) -> list[int]:
        """Of all ranks' numbers the largest, place by place, are those of their common step."""
        return [self.num_tokens, not self.is_uniform, self.is_cascade, not self.in_halves]

    @classmethod
    def of(cls, numbers: Sequence[int]) -> CommonStep:
        """The step of these numbers."""
        num_tokens, is_mixed, is_cascade, is_whole = numbers
        return cls(num_tokens=num_tokens, is_uniform=not is_mixed, is_cascade=bool(is_cascade), in_halves=not is_whole)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass. `removed` is applied first, then `new`, `sampled`, `told`, then `rows`, in batch order."""

    step_id: int
    removed: Sequence[str]
    new: Sequence[NewRow]
    rows: ScheduledRows
    num_tokens: int
    """Sum of num_new_tokens over rows; 0 in a plan that is executed: other copies of the model have some."""
    num_common_blocks: int = 0
    """Leading blocks that the full-attention tables of all rows have in common; counted only for cascade attention."""
    masked: Sequence[int] = ()
    """Rows that sample under a mask, in order."""
    told: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Request id -> tokens that follow those that the worker has, which were not sampled but forced."""
    sampled: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Request id -> tokens that were sampled since its last row, for stages that do not sample themselves."""
    common: CommonStep | None = None
    """What data ranks that step together have agreed on; None: there are none, or nothing to agree on."""

    @property
    def in_halves(self) -> bool:
        """Whether it is computed as two halves, as every data rank does then."""
        return self.common is not None and self.common.in_halves


@dataclass(frozen=True, slots=True, eq=False)
class StepMasks:
    """What masked rows of a step may sample."""

    rows: Sequence[int]
    """Of the plan, in order; its other masked rows sit out."""
    allowed: NDArray[np.int32]
    """[rows, words that cover the vocabulary]: bit `i % 32` of word `i // 32` says whether token i may come."""
    if_likeliest: NDArray[np.int32] | None = None
    """Alike: tokens that may come besides where the model holds one of them for the likeliest of all."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the chosen token first, then the most likely, in falling order."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    rank: int
    """Rank of the chosen token, 1 being the most likely."""


class FailureKind(enum.Enum):
    """Why one request cannot go on."""

    NOT_NUMBERS = enum.auto()
    """NaN or infinity came out of the model."""
    NOTHING_LEFT = enum.auto()
    """No token may be sampled: all are forbidden."""
    OUT_OF_MEMORY = enum.auto()
    """The device had no room for the step."""
    STEP_FAILED = enum.auto()
    """The step raised something else, or gave no token where one was due."""
    KV_LOAD_FAILED = enum.auto()
    """The K/V of its prompt did not come, and it must not be computed here."""
    KV_SEND_FAILED = enum.auto()
    """The K/V of its prompt, which was asked for, did not get to who asked."""
    FORM_FAILED = enum.auto()
    """Its form could not be compiled or followed."""
    PROCESSOR_FAILED = enum.auto()
    """A logits processor raised over it."""


class ExpertLoad(msgspec.Struct, frozen=True, array_like=True):
    """How evenly ranks were wanted that have a mixture's experts among them, over the layers of a stage."""

    rank_tokens: Sequence[float]
    """Of each: tokens that it computed, once for each expert and layer, since the start."""
    busiest: float
    """The busiest rank's over that of all in the mean, in the mean of the layers, within the latest window."""

    def stats(self) -> Mapping[str, float]:
        """By the names of docs/metrics.md."""
        name = "pagefleet_engine_expert_rank_tokens_total"
        tokens = {f'{name}{{rank="{rank}"}}': tokens for rank, tokens in enumerate(self.rank_tokens)}
        return {"pagefleet_engine_expert_busiest_ratio": self.busiest, **tokens}


@dataclass(frozen=True, slots=True)
class StepResult:
    """Outcome of one plan."""

    sampled: Sequence[Sequence[int]]
    """Per row of the plan: the tokens sampled, empty where the row does not sample or sits out."""
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Request id -> one entry per sampled token, for those who ask."""
    prompt_logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Request id -> entries of the prompt positions computed in this step (position 0 has none), in order."""
    failed: Mapping[str, FailureKind] = field(default_factory=dict)
    """Request id -> why this request cannot go on; the others of the step are not affected."""
