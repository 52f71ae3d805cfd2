"""The steps that were planned and not taken in yet: whose rows they have, and which of these give no token after all.

A row that samples under a mask sits its step out where no mask comes in time, and its last token is computed again; or
where its token was found out without sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.request import Request, RequestStatus
from pagefleet_engine.core.step import StepPlan


class ToMask(NamedTuple):
    """Rows of a plan that are to be sampled under a mask, in order."""

    rows: Sequence[int]
    requests: Sequence[Request]


NOTHING_TO_MASK = ToMask((), ())


class InFlight:
    """Owned by the scheduler."""

    def __init__(self) -> None:
        self._steps: dict[int, Sequence[Request | None]] = {}
        """Step -> request of each row; None where it was preempted since, so that the row counts no more."""
        self._sat_out: dict[tuple[int, str], int] = {}
        """Step and request -> tokens of its row that are computed again."""

    def launch(self, step_id: int, requests: Sequence[Request | None]) -> None:
        """A step is on its way."""
        self._steps[step_id] = requests

    def land(self, step_id: int) -> Sequence[Request | None]:
        """A step is done; returns its requests."""
        return self._steps.pop(step_id)

    def preempt(self, request: Request) -> None:
        """What the steps give the request counts no more."""
        for step_id, requests in self._steps.items():
            if request in requests:
                self._steps[step_id] = [None if other is request else other for other in requests]

    def to_mask(self, plan: StepPlan) -> ToMask:
        """The masked rows of a step that still count."""
        requests, running = self._steps[plan.step_id], RequestStatus.RUNNING
        rows, asking = [], []
        for row in plan.masked:
            request = requests[row]
            if request is not None and request.status is running:
                rows.append(row)
                asking.append(request)
        return ToMask(rows, asking)

    def sit_out(self, plan: StepPlan, request: Request, num_again: int) -> None:
        """The request's row of the step gives no token; of those that it computes `num_again` are computed again."""
        request.num_pending -= 1
        request.num_computed_tokens -= num_again
        self._sat_out[plan.step_id, request.request_id] = num_again

    def sat_out(self, step_id: int, request: Request) -> int | None:
        """For a step that is done: how many tokens its row computed in vain; None where it was to give a token."""
        return self._sat_out.pop((step_id, request.request_id), None) if self._sat_out else None

    def forget(self, request: Request) -> None:
        """The request is over, or loses its blocks."""
        if self._sat_out:
            for key in [key for key in self._sat_out if key[1] == request.request_id]:
                del self._sat_out[key]

    def check_integrity(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Check that requests count what is on its way for them.

        Raises:
            IntegrityError: one does not.
        """
        if any(request.num_pending or request.num_computed_tokens or request.untold for request in waiting):
            raise IntegrityError("a request in the queue counts what it has lost")
        if not self._sat_out.keys() <= {(step, request.request_id) for step in self._steps for request in running}:
            raise IntegrityError("a row sits out that is in no step")
        for request in running:
            num_rows = sum(request in requests for requests in self._steps.values())
            if not 0 <= request.num_pending <= num_rows:
                raise IntegrityError(f"{request.request_id} awaits {request.num_pending} tokens of {num_rows} steps")
            if not request.num_computed_tokens < request.num_tokens + request.num_pending <= request.ends_at:
                raise IntegrityError(f"{request.request_id} is computed further than its tokens go")
