"""How much memory the bodies of all clients take together, from their first bytes until their requests are answered."""

from __future__ import annotations

from pagefleet_router.proxy.client_request import ClientRequest

SMALL_BYTES = 16 * 1024
"""Shorter bodies are not counted: the number of connections bounds them."""


class BodyMemory:
    """Counts what large bodies take.

    Args:
        max_bytes: of all together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.num_bytes = 0
        self._max_bytes = max_bytes

    def take(self, request: ClientRequest, num_bytes: int) -> bool:
        """Count a body as `num_bytes` long; returns False, and counts no more of it, where that is too much."""
        more = num_bytes - request.num_counted
        if self.num_bytes + more > self._max_bytes:
            return False
        request.num_counted = num_bytes
        self.num_bytes += more
        return True

    def give_back(self, request: ClientRequest) -> None:
        """Count a body no more; once is as good as twice."""
        self.num_bytes -= request.num_counted
        request.num_counted = 0
