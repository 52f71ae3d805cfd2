"""Offers computed blocks to a connector, and keeps those that it is still reading."""

from __future__ import annotations

from collections.abc import Iterable

from pagefleet_kv.port import KVConnector

from pagefleet_engine.core.block_pool import IntegrityError
from pagefleet_engine.core.kv_cache import KVCache
from pagefleet_engine.core.request import Request


class KVSaves:
    """Every full block of a running request is offered once per admission, in order, after the step that filled it.

    A full block is never written again, so the connector may read what it was offered until the block is given back;
    a pin keeps that from happening.
    """

    def __init__(self, connector: KVConnector, kv_cache: KVCache) -> None:
        self._enabled = connector.bell is not None
        self._connector = connector
        self._kv_cache = kv_cache
        self._block_size = kv_cache.block_size

    def admitted(self, request: Request, num_cached_tokens: int) -> None:
        """Offer what was found in the cache."""
        if self._enabled and num_cached_tokens:
            self._offer(request, 0, num_cached_tokens // self._block_size)

    def computed(self, request: Request, num_before: int, num_computed_tokens: int) -> None:
        """Offer the blocks that a step, which is done, has filled beyond the first `num_before` tokens."""
        if self._enabled:
            self._offer(request, num_before // self._block_size, num_computed_tokens // self._block_size)

    def relieve(self, num_blocks: int) -> None:
        """The pool lacks so many blocks: where pins hold some, the connector is asked to do without."""
        if num_blocks > 0 and self._kv_cache.holds.num_pins:
            self._connector.relieve(num_blocks)

    def relieve_for(self, request: Request, spare_blocks: int) -> None:
        """A request is not admitted for want of blocks, of which `spare_blocks` are to stay available."""
        if self._kv_cache.holds.num_pins:
            wanted = self._kv_cache.taken_by_admission(request) + spare_blocks
            self.relieve(wanted - self._kv_cache.num_available_blocks)

    def settle(self, numbers: Iterable[int]) -> None:
        """Let blocks go whose saves have ended."""
        for number in numbers:
            self._kv_cache.holds.unpin(number)

    def check_integrity(self) -> None:
        """Check that nothing is pinned where there is no connector.

        Raises:
            IntegrityError: something is.
        """
        if not self._enabled and self._kv_cache.holds.num_pins:
            raise IntegrityError("blocks are pinned and there is no connector")

    def _offer(self, request: Request, first: int, last: int) -> None:
        run = self._kv_cache.block_run(request, first, last)
        number = self._connector.save(request, (run,))
        if number is not None:
            self._kv_cache.holds.pin(number, run.blocks)
