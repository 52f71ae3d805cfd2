"""What a choice depends on, taken from a request."""

from __future__ import annotations

from dataclasses import dataclass

from pagefleet_router.prefix.pieces import Pieces


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request as the scheduler sees it.

    `model` None means that any engine can answer; `pieces` is the hashed prompt, empty when prefixes do not matter.
    """

    model: str | None
    pieces: Pieces = ()
