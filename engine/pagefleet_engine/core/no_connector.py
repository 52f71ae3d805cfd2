"""The connector of an engine that passes K/V to nobody."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_kv.port import BlockRun, KVRequest, KVTransferStats, TransfersDone

_NOTHING = TransfersDone()


class NoConnector:
    """Implements `KVConnector`: it has nothing, keeps nothing and never rings."""

    bell = None

    def arrived(self, request: KVRequest) -> None:
        """Nothing waits for it anywhere."""

    def loadable(self, request: KVRequest, num_cached_tokens: int) -> int | None:
        """Nothing."""
        return 0

    def load(self, request: KVRequest, runs: Sequence[BlockRun]) -> None:
        """Not called, as nothing is loadable."""
        raise AssertionError("there is nothing to load")

    def cancel(self, request_id: str) -> None:
        """Nothing is under way."""

    def save(self, request: KVRequest, runs: Sequence[BlockRun]) -> int | None:
        """No need to keep anything."""
        return None

    def relieve(self, num_blocks: int) -> None:
        """Nothing is kept."""

    def discard(self, request: KVRequest) -> None:
        """Nothing is stored."""

    def ended(self, request: KVRequest, completed: bool) -> int | None:
        """Nobody waits for it."""
        return None

    def finished(self) -> TransfersDone:
        """Nothing."""
        return _NOTHING

    def reset(self) -> None:
        """Nothing is stored."""

    def drain(self) -> None:
        """Nothing is taken on."""

    @property
    def num_owed(self) -> int:
        """None."""
        return 0

    def stats(self) -> KVTransferStats:
        """Nothing is counted."""
        return KVTransferStats()

    def close(self) -> None:
        """Nothing runs."""
