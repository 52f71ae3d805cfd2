"""A step's plan while it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet_engine.core.request import Request
from pagefleet_engine.core.step import NewRow, ScheduledRows, StepPlan


@dataclass(slots=True)
class StepDraft:
    """Rows so far, and what may still be given out."""

    budget: int
    """Tokens that may still be scheduled."""
    chunk: int
    """Most tokens for one request."""
    requests: list[Request | None] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_blocks: dict[int, Sequence[Sequence[int]]] = field(default_factory=dict)
    new: list[NewRow] = field(default_factory=list)
    masked: list[int] = field(default_factory=list)
    told: dict[str, Sequence[int]] = field(default_factory=dict)
    sampled: dict[str, Sequence[int]] = field(default_factory=dict)
    decoding_left: int = 0
    """Rows of one token that may still be added, where several stages share them out."""
    preempted: bool = False
    _granted: int = field(init=False)

    def __post_init__(self) -> None:
        self._granted = self.budget

    @property
    def num_tokens(self) -> int:
        """Tokens that were given out."""
        return self._granted - self.budget

    def leaves_out(self, request: Request, num_new: int) -> bool:
        """Whether a request of a pipeline has to wait: its next token is on its way, or enough rows decode."""
        return request.num_pending > 0 or (num_new == 1 and self.decoding_left <= 0)

    def plan(self, step_id: int, removed: Sequence[str], num_common_blocks: int) -> StepPlan:
        """Make the plan; see its fields."""
        rows = ScheduledRows.of_columns(self.request_ids, self.computed, self.new_tokens, self.samples, self.new_blocks)
        new, masked, told, sampled = self.new, self.masked, self.told, self.sampled
        return StepPlan(step_id, removed, new, rows, self.num_tokens, num_common_blocks, masked, told, sampled)

    def put(self, request: Request, num_new: int, blocks: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Add a row for the next `num_new` of the request's `num_tokens` tokens, pending ones included."""
        num_computed = request.num_computed_tokens
        request.num_computed_tokens = end = num_computed + num_new
        samples = end == num_tokens
        if samples:
            request.num_pending += 1
            if request.matcher is not None:
                self.masked.append(len(self.requests))
        if request.untold:
            self.told[request.request_id] = tuple(request.untold)
            request.untold.clear()
        if request.unshared:
            self.sampled[request.request_id], request.unshared = request.unshared, ()
        self.decoding_left -= num_new == 1
        self.budget -= num_new
        if blocks:
            self.new_blocks[len(self.requests)] = blocks
        self.requests.append(request)
        self.request_ids.append(request.request_id)
        self.computed.append(num_computed)
        self.new_tokens.append(num_new)
        self.samples.append(samples)
