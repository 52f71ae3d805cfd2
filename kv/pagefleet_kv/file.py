"""Writes every computed block to a folder and reads prompts' prefixes from it: slow, unbounded, and easy to look at.

Several engines of one model may share the folder. What it has of a prompt is found out by looking, in a thread; so the
first answer to `loadable` is that it is not known yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pagefleet_protocol.block_hash import extend_hashes

from pagefleet_kv.config import KVTransferConfig
from pagefleet_kv.errors import KVConfigError
from pagefleet_kv.port import (
    BlockRun,
    BuiltConnector,
    EngineIdentity,
    EngineSide,
    KVConnector,
    KVRequest,
    KVTransferStats,
    LoadDone,
    TransfersDone,
)
from pagefleet_kv.store.blob_store import BlobStore
from pagefleet_kv.store.block_io import FolderJob, LoadJob, ProbeJob, StoreJob
from pagefleet_kv.store.block_key import keys_of_groups, run_keys
from pagefleet_kv.store.manifest import claim_folder
from pagefleet_kv.store.mover import BlockMover

METRIC = "pagefleet_engine_kv_transfer_file"


@dataclass(slots=True)
class _Question:
    """What was asked of the folder for one request: which of its blocks `first` to `limit` are a longer prefix?"""

    first: int
    limit: int
    num_found: int | None = None


class FileConnector(KVConnector):
    def __init__(self, mover: BlockMover, store: BlobStore) -> None:
        self._mover = mover
        self._store = store
        self._block_size = store.shape.block_size
        self._num_jobs = 0
        self._questions: dict[str, _Question] = {}
        self._probes: dict[int, _Question] = {}
        self._loads: dict[int, str] = {}
        self._saves: set[int] = set()
        self._num_loaded = 0

    @property
    def bell(self) -> int:
        return self._mover.bell

    def loadable(self, request: KVRequest, num_cached_tokens: int) -> int | None:
        first = num_cached_tokens // self._block_size
        limit = (request.num_tokens - 1) // self._block_size
        if not request.reads_prefix_cache or first >= limit:
            return num_cached_tokens
        question = self._questions.get(request.request_id)
        if question is None or (question.first, question.limit) != (first, limit):
            question = self._ask(request, first, limit)
        if question.num_found is None:
            return None
        return max(num_cached_tokens, (first + question.num_found) * self._block_size)

    def load(self, request: KVRequest, runs: Sequence[BlockRun]) -> None:
        self._questions.pop(request.request_id, None)
        number = self._number()
        blocks = [block for run in runs for block in run.blocks]
        self._loads[number] = request.request_id
        self._mover.start(LoadJob(number, blocks, run_keys(runs)))

    def cancel(self, request_id: str) -> None:
        for number, loading in self._loads.items():
            if loading == request_id:
                self._mover.cancel(number)

    def save(self, request: KVRequest, runs: Sequence[BlockRun]) -> int | None:
        """See KVConnector. Blocks stay in the pool until they are written, so none is lost to a slow disk."""
        blocks = [block for run in runs for block in run.blocks]
        if not blocks:
            return None
        number = self._number()
        self._saves.add(number)
        self._mover.start(StoreJob(number, blocks, run_keys(runs)))
        return number

    def discard(self, request: KVRequest) -> None:
        """See KVConnector. A moment passes until the files are gone."""
        keys = keys_of_groups(request.block_hashes, len(self._store.shape.windows))
        self._mover.start(FolderJob(self._number(), "drop", keys))

    def ended(self, request: KVRequest, completed: bool) -> int | None:
        self._questions.pop(request.request_id, None)
        return None

    def finished(self) -> TransfersDone:
        loads, saves = [], []
        for move in self._mover.finished():
            if move.job_id in self._probes:
                self._probes.pop(move.job_id).num_found = move.num_blocks
            elif move.job_id in self._loads:
                loads.append(LoadDone(self._loads.pop(move.job_id), move.num_blocks))
                self._num_loaded += move.num_blocks
            elif move.job_id in self._saves:
                self._saves.remove(move.job_id)
                saves.append(move.job_id)
        return TransfersDone(loads, saves)

    def reset(self) -> None:
        """See KVConnector. The folder is emptied for all who share it."""
        self._questions.clear()
        self._mover.start(FolderJob(self._number(), "clear"))

    @property
    def num_owed(self) -> int:
        """Saves that are not on the disk yet."""
        return len(self._saves)

    def stats(self) -> KVTransferStats:
        return KVTransferStats(
            {
                f"{METRIC}_loaded_blocks_total": self._num_loaded,
                f"{METRIC}_saved_blocks_total": self._store.num_writes,
                f"{METRIC}_damaged_total": self._store.num_damaged,
                f"{METRIC}_failed_writes_total": self._store.num_failed_writes,
            }
        )

    def close(self) -> None:
        self._mover.close()

    def _ask(self, request: KVRequest, first: int, limit: int) -> _Question:
        extend_hashes(request.block_hashes, request.prefix_root, request.token_ids, self._block_size)
        question = self._questions[request.request_id] = _Question(first, limit)
        number = self._number()
        self._probes[number] = question
        self._mover.start(ProbeJob(number, first, request.block_hashes[first:limit]))
        return question

    def _number(self) -> int:
        self._num_jobs += 1
        return self._num_jobs


def check(config: KVTransferConfig, identity: EngineIdentity) -> None:
    """See ConnectorKind: it needs a folder."""
    _folder(config)


def build(config: KVTransferConfig, side: EngineSide) -> BuiltConnector:
    shape, pages = side.shape, side.pages
    store = BlobStore(claim_folder(_folder(config), shape, alone=False), shape, pages.bytes_per_block)
    return BuiltConnector(FileConnector(BlockMover(pages, memoryview(b""), store), store))


def _folder(config: KVTransferConfig) -> Path:
    if config.kv_offload_dir is None:
        raise KVConfigError("kv_connector file needs a folder: give kv_offload_dir")
    return Path(config.kv_offload_dir)
