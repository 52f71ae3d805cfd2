"""Keeps K/V in host memory, then on disk, and brings it back: to prompts that come again and to preempted requests.

    pool --save--> host memory --spill--> disk        copies, while steps run
    pool <--load-- host memory
    pool <--load--------------------------- disk      what is loaded is found in the pool, and saved to memory again

All decisions are made here, by the thread that schedules; a mover does them. What is being moved is held in its tier,
so it is not evicted. A block is known by its hash, which covers model, adapter and salt, and is kept once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagefleet_protocol.block_hash import extend_hashes
from pagefleet_protocol.kv_blob import KvShape

from pagefleet_kv.offload.tier import Spiller, Tier
from pagefleet_kv.port import BlockRun, KVConnector, KVRequest, KVTransferStats, LoadDone, TransfersDone
from pagefleet_kv.store.block_io import CopyOutJob, FolderJob, LoadJob, MoveDone, SpillJob
from pagefleet_kv.store.block_key import BlockKey, block_keys, keys_of_groups, run_keys
from pagefleet_kv.store.mover import BlockMover
from pagefleet_kv.store.prefix import longest_prefix

METRIC = "pagefleet_engine_kv_transfer_offload"


@dataclass(frozen=True, slots=True)
class _Load:
    request_id: str
    keys: Sequence[BlockKey]
    sources: Sequence[int | BlockKey]
    """A slot of host memory, or the key again of a block on disk."""


@dataclass(frozen=True, slots=True)
class _Save:
    keys: Sequence[BlockKey]


@dataclass(frozen=True, slots=True)
class _Spill:
    key: BlockKey


class OffloadConnector(KVConnector):
    """Implements `KVConnector`.

    Args:
        mover: of the worker's pages, with a slot for each block of `host`, and the folder of `disk`.
        host: the blocks in memory.
        disk: those on disk; None: there is no disk.
        release: called when nothing touches the host memory any more.
    """

    def __init__(
        self, mover: BlockMover, host: Tier, disk: Tier | None, shape: KvShape, release: Callable[[], None]
    ) -> None:
        self._mover = mover
        self._host = host
        self._disk = disk
        self._spiller = None if disk is None else Spiller(host, disk)
        self._shape = shape
        self._block_size = shape.block_size
        self._release = release
        self._jobs: dict[int, _Load | _Save | _Spill] = {}
        self._load_of_request: dict[str, int] = {}
        self._num_jobs = 0
        self._nothing_to_load: list[str] = []
        """Requests whose load had nothing to do; told by `finished`."""
        self._num_hits = 0
        self._num_misses = 0

    @property
    def bell(self) -> int:
        return self._mover.bell

    @property
    def num_moves(self) -> int:
        """Loads, saves and spills that have not ended."""
        return len(self._jobs)

    def loadable(self, request: KVRequest, num_cached_tokens: int) -> int | None:
        """See KVConnector. At least one token is left to be computed, as it is with the prefix cache."""
        if not request.reads_prefix_cache:
            return num_cached_tokens
        extend_hashes(request.block_hashes, request.prefix_root, request.token_ids, self._block_size)
        first = num_cached_tokens // self._block_size
        limit = (request.num_tokens - 1) // self._block_size

        def has(group: int, index: int) -> bool:
            (key,) = block_keys(request.block_hashes[index : index + 1], group)
            return self._host.has(key) or (self._disk is not None and self._disk.has(key))

        return max(num_cached_tokens, longest_prefix(self._shape, first, limit, has) * self._block_size)

    def load(self, request: KVRequest, runs: Sequence[BlockRun]) -> None:
        """See KVConnector. What was given up since `loadable` is not loaded."""
        blocks = [block for run in runs for block in run.blocks]
        keys: list[BlockKey] = []
        sources: list[int | BlockKey] = []
        for key in run_keys(runs):
            if self._host.has(key):
                sources.append(self._host.hold(key))
            elif self._disk is not None and self._disk.has(key):
                self._disk.hold(key)
                sources.append(key)
            else:
                break
            keys.append(key)
        self._use(keys)
        if not keys:
            self._nothing_to_load.append(request.request_id)
            self._mover.ring()
            return
        number = self._number(_Load(request.request_id, keys, sources))
        self._load_of_request[request.request_id] = number
        self._mover.start(LoadJob(number, blocks[: len(keys)], sources))

    def cancel(self, request_id: str) -> None:
        number = self._load_of_request.get(request_id)
        if number is not None:
            self._mover.cancel(number)

    def save(self, request: KVRequest, runs: Sequence[BlockRun]) -> int | None:
        """See KVConnector. Where all of the memory is being moved, the rest of the blocks is not kept."""
        num_prompt_blocks = request.num_prompt_tokens // self._block_size
        keys, blocks, slots = [], [], []
        for run in runs:
            run_of_keys = block_keys(run.hashes, run.group)
            self._use(run_of_keys)
            for index, (key, block) in enumerate(zip(run_of_keys, run.blocks, strict=True), run.first):
                if key in self._host:
                    continue
                is_new = self._disk is None or key not in self._disk
                place = self._host.reserve(key)
                if place is None:
                    break
                self._num_misses += is_new and index < num_prompt_blocks
                keys.append(key)
                blocks.append(block)
                slots.append(place.slot)
        if not keys:
            return None
        self._host.settle(keys)
        number = self._number(_Save(keys))
        self._mover.start(CopyOutJob(number, blocks, slots))
        return number

    def discard(self, request: KVRequest) -> None:
        """See KVConnector. What is being moved of it is not found any more, and goes when that has ended."""
        keys = keys_of_groups(request.block_hashes, len(self._shape.windows))
        self._host.doom(keys)
        if self._disk is not None:
            self._drop(self._disk.doom(keys))

    def ended(self, request: KVRequest, completed: bool) -> int | None:
        """See KVConnector. Its blocks are equally old now, and its tail is to go before its head; where a window sees
        the tail alone, the head goes first of all."""
        for group, window in reversed([*enumerate(self._shape.windows)]):
            keys = block_keys(request.block_hashes, group)
            self._host.settle(keys if window is None else keys[::-1])
        self._spill()
        return None

    def finished(self) -> TransfersDone:
        loads = [LoadDone(request_id, 0) for request_id in self._nothing_to_load]
        self._nothing_to_load.clear()
        saves = []
        for move in self._mover.finished():
            match self._jobs.pop(move.job_id, None):
                case _Load() as load:
                    self._end_load(load, move)
                    loads.append(LoadDone(load.request_id, move.num_blocks))
                case _Save() as save:
                    self._end_save(save, move)
                    saves.append(move.job_id)
                case _Spill() as spill:
                    self._end_spill(spill, move)
                case None:  # files were deleted
                    pass
        if self._spiller is not None:
            self._drop(self._spiller.adopt(self._mover.found()))
        if saves:
            self._spill()
        return TransfersDone(loads, saves)

    def reset(self) -> None:
        """See KVConnector. What is being loaded goes once that has ended; what is being saved is not kept."""
        self._host.doom_all()
        if self._spiller is not None:
            self._drop(self._spiller.reset())

    @property
    def num_owed(self) -> int:
        """Blocks on their way to the disk; what is in memory goes with the engine."""
        return sum(isinstance(job, _Spill) for job in self._jobs.values())

    def stats(self) -> KVTransferStats:
        counters: dict[str, float] = {
            f"{METRIC}_hits_total": self._num_hits,
            f"{METRIC}_misses_total": self._num_misses,
            f"{METRIC}_evictions_total": self._host.num_evictions + (self._disk.num_evictions if self._disk else 0),
        }
        gauges: dict[str, float] = {f'{METRIC}_bytes{{tier="host"}}': len(self._host) * self._mover.block_bytes}
        store = self._mover.store
        if self._disk is not None and store is not None:
            gauges[f'{METRIC}_bytes{{tier="disk"}}'] = len(self._disk) * store.file_bytes
            counters[f"{METRIC}_damaged_total"] = store.num_damaged
            counters[f"{METRIC}_failed_writes_total"] = store.num_failed_writes
        return KVTransferStats(counters, gauges)

    def close(self) -> None:
        self._mover.close()
        self._release()

    def _use(self, keys: Sequence[BlockKey]) -> None:
        self._host.touch(keys)
        if self._disk is not None:
            self._disk.touch(keys)

    def _end_load(self, load: _Load, move: MoveDone) -> None:
        if self._load_of_request.get(load.request_id) == move.job_id:
            del self._load_of_request[load.request_id]
        self._num_hits += move.num_blocks
        for index, (key, source) in enumerate(zip(load.keys, load.sources, strict=True)):
            if isinstance(source, int):
                self._host.release(key)
                continue
            assert self._disk is not None
            is_wrong = move.error is not None and index == move.num_blocks
            if self._disk.abandon(key) if is_wrong else self._disk.release(key):
                self._drop([key])

    def _end_save(self, save: _Save, move: MoveDone) -> None:
        for key in save.keys[: move.num_blocks]:
            self._host.commit(key)
        for key in save.keys[move.num_blocks :]:
            self._host.abandon(key)

    def _end_spill(self, spill: _Spill, move: MoveDone) -> None:
        assert self._spiller is not None
        if self._spiller.ended(spill.key, written=move.num_blocks == 1):
            self._drop([spill.key])

    def _spill(self) -> None:
        store = self._mover.store
        if self._spiller is None or store is None or not store.takes_writes:
            return
        for spill in self._spiller.due():
            if spill.evicted is not None:
                self._drop([spill.evicted])
            self._mover.start(SpillJob(self._number(_Spill(spill.key)), spill.slot, spill.key))

    def _drop(self, keys: Sequence[BlockKey]) -> None:
        if keys:
            self._num_jobs += 1
            self._mover.start(FolderJob(self._num_jobs, "drop", keys))

    def _number(self, job: _Load | _Save | _Spill) -> int:
        self._num_jobs += 1
        self._jobs[self._num_jobs] = job
        return self._num_jobs
