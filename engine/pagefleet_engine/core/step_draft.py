"""A step's plan while it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagefleet_engine.core.request import Request
from pagefleet_engine.core.step import NewRow, ScheduledRows


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
    preempted: bool = False

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
        self.budget -= num_new
        if blocks:
            self.new_blocks[len(self.requests)] = blocks
        self.requests.append(request)
        self.request_ids.append(request.request_id)
        self.computed.append(num_computed)
        self.new_tokens.append(num_new)
        self.samples.append(samples)

    def rows(self) -> ScheduledRows:
        """All that were put."""
        return ScheduledRows.of_columns(self.request_ids, self.computed, self.new_tokens, self.samples, self.new_blocks)
