"""A request's place at the gate."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_router.admission.admission import Waiter


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
