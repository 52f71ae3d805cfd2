"""What a source of endpoints is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pagefleet_protocol.endpoints import Endpoint

OnEndpoints = Callable[[Sequence[Endpoint]], None]


class EndpointSource(Protocol):
    """Reports the list of engines, now and whenever it changes."""

    async def run(self, report: OnEndpoints) -> None:
        """Report until cancelled; the first report comes before the first pause."""
