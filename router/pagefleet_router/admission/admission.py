"""The gate before the choice of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pagefleet_router.errors import Refusal
from pagefleet_router.request_view import RequestView


class Waiter(Protocol):
    """A request at the gate."""

    @property
    def view(self) -> RequestView:
        """What it is like."""

    @property
    def num_body_bytes(self) -> int:
        """Memory that it takes while it waits."""

    def admitted(self) -> None:
        """Go on: called once, later than `enter`, for a request that had to wait."""

    def turned_away(self, refusal: Refusal) -> None:
        """Give up: called once, in place of `admitted`."""


class Admission(Protocol):
    """Lets requests in, in a fair order, as long as engines have room."""

    def enter(self, waiter: Waiter) -> bool:
        """Return True to let a request in now; False: it waits, and hears of it.

        Raises:
            Refusal: it may not even wait.
        """

    def left(self, waiter: Waiter) -> None:
        """Forget a request that gave up waiting: its client is gone."""

    def ended(self, waiter: Waiter, num_tokens: int) -> None:
        """Take back the place of a request that was let in, with the tokens (prompt and answer) that it cost."""

    def engines_changed(self) -> None:
        """Look again: engines came, left, became ready or lost requests."""

    def check(self, now: float) -> None:
        """Turn away those who have waited for too long; called a few times a second."""


@dataclass(slots=True, eq=False)
class Ticket:
    """What the gate keeps of a request that waits, or of one that was let in and is yet to be settled."""

    waiter: Waiter
    tenant: str
    priority: int
    """As far as its tenant may go."""
    num_prompt_tokens: int
    """As estimated when it came."""
    cost: int
    """Tokens that it is expected to take, prompt and answer."""
    num_bytes: int
    """Of its body."""
    number: int
    """Counts arrivals."""
    arrived_at: float
    deadline: float
