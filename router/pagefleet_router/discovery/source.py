"""What a source of endpoints is, and who listens to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pagefleet_protocol.endpoints import Endpoint


class EndpointSink(Protocol):
    """Takes what a source finds."""

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Take over a new list."""

    def explain(self, reason: str) -> None:
        """Note why there is no list. Strangers may read the reason: it names no address."""


class EndpointSource(Protocol):
    """Reports the list of engines, now and whenever it changes."""

    async def run(self, sink: EndpointSink) -> None:
        """Report until cancelled. While nothing can be read, the last list stays in force."""
