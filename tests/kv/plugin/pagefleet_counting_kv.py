"""A connector from another package: it brings nothing and counts the blocks that it is offered."""

from __future__ import annotations

from collections.abc import Sequence

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.port import (
    BlockRun,
    BuiltConnector,
    EngineIdentity,
    EngineSide,
    KVRequest,
    KVTransferStats,
    TransfersDone,
)

METRIC = "counting_offered_blocks_total"


class CountingConnector:
    """Implements `KVConnector`."""

    bell = None

    def __init__(self) -> None:
        self._num_offered = 0

    def arrived(self, request: KVRequest) -> None:
        pass

    def loadable(self, request: KVRequest, num_cached_tokens: int) -> int | None:
        return num_cached_tokens

    def load(self, request: KVRequest, runs: Sequence[BlockRun]) -> None:
        raise AssertionError("there is nothing to load")

    def cancel(self, request_id: str) -> None:
        pass

    def save(self, request: KVRequest, runs: Sequence[BlockRun]) -> int | None:
        self._num_offered += sum(len(run.blocks) for run in runs)
        return None

    def relieve(self, num_blocks: int) -> None:
        pass

    def discard(self, request: KVRequest) -> None:
        pass

    def ended(self, request: KVRequest, completed: bool) -> int | None:
        return None

    def finished(self) -> TransfersDone:
        return TransfersDone()

    def reset(self) -> None:
        pass

    def drain(self) -> None:
        pass

    @property
    def num_owed(self) -> int:
        return 0

    def stats(self) -> KVTransferStats:
        return KVTransferStats({METRIC: float(self._num_offered)})

    def close(self) -> None:
        pass


def check(config: KVTransferConfig, identity: EngineIdentity) -> None:
    """It keeps nothing on disk."""
    if config.kv_offload_dir is not None:
        raise KVConfigError("kv_connector counting takes no folder: leave kv_offload_dir out")


def build(config: KVTransferConfig, side: EngineSide) -> BuiltConnector:
    """Make one."""
    return BuiltConnector(CountingConnector())
