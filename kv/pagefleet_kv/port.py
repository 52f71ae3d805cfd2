"""The port between an engine and its connectors: what the scheduler asks of one, and what a worker gives it.

An engine's core imports this and nothing else of the package, and it knows no torch. The scheduler's side
(`KVConnector`) decides in requests, blocks and hashes; it lives in the thread that schedules and never waits. The
worker's side (`KVPages`) is the bytes of those blocks, which a connector moves in threads of its own.

A load becomes a prefix hit: its blocks are held for it, filled, and published only once all of them are known to be
right; then the request is queued and finds them like any other cached prefix. What did not come is computed. So
`schedule` knows nothing of transfers, no token is ever computed over K/V that was not committed, and a request that
waits for K/V takes neither a seat nor a token of any step.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_blob import KvShape
from pagefleet_protocol.kv_handoff import KvFault, KvTransfer


class KVRequest(Protocol):
    """A request, as its connectors see it: they read it, and extend its hashes."""

    @property
    def request_id(self) -> str:
        """Unique among those that have not ended."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt, then output."""

    @property
    def num_tokens(self) -> int:
        """How many these are."""

    @property
    def num_prompt_tokens(self) -> int:
        """How many of them are the prompt."""

    @property
    def reads_prefix_cache(self) -> bool:
        """False: all of it must be computed here."""

    @property
    def prefix_root(self) -> BlockHash:
        """What the hash of its first block follows."""

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Of its first full blocks, as far as anybody asked: `extend_hashes` appends."""

    @property
    def transfer(self) -> KvTransfer | None:
        """The leg of a P/D transfer that it is, if any."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Full blocks of one request that follow each other, in one KV group."""

    first: int
    """Index, in the request, of the first of them."""
    blocks: Sequence[int]
    """Their numbers in the pool."""
    hashes: Sequence[BlockHash]
    """What they hold."""
    group: int = 0

    def since(self, first: int) -> BlockRun:
        """Those from this index on; maybe none."""
        skipped = max(0, first - self.first)
        return BlockRun(self.first + skipped, self.blocks[skipped:], self.hashes[skipped:], self.group)

    def until(self, last: int) -> BlockRun:
        """Those before this index; maybe none."""
        count = max(0, last - self.first)
        return BlockRun(self.first, self.blocks[:count], self.hashes[:count], self.group)


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load that ended. Nothing writes to its blocks any more, however it ended."""

    request_id: str
    num_blocks: int
    """Leading blocks of what was to be loaded, run after run, that are right, to be used."""
    failure: str | None = None
    """Why the request must not go on; None: it does, and computes what is missing, as one does that has run before."""
    fault: KvFault | None = None
    """The same for programs, where it is known."""


@dataclass(frozen=True, slots=True)
class AnswerDone:
    """An answer that need not be held any more."""

    number: int
    """As `KVConnector.ended` gave it."""
    failure: str | None = None
    """Why the request has failed after all: its K/V is not where it should be."""


@dataclass(frozen=True, slots=True)
class TransfersDone:
    """What ended since the last time."""

    loads: Sequence[LoadDone] = ()
    saves: Sequence[int] = ()
    """Numbers that `KVConnector.save` gave: their blocks need not be kept any more."""
    answers: Sequence[AnswerDone] = ()


_NOTHING = TransfersDone()


@dataclass(frozen=True, slots=True)
class KVTransferStats:
    """Totals since the start, and gauges, of all that a connector does. Names as they stand in docs/metrics.md."""

    counters: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


class KVConnector:
    """The scheduler's side. Called by the thread that schedules; no call waits for anything.

    As it stands here it has nothing, keeps nothing and never rings; connectors say what they do otherwise.
    """

    @property
    def bell(self) -> int | None:
        """A file descriptor that is readable while `finished` has something to tell; None: there never is."""
        return None

    def arrived(self, request: KVRequest) -> None:
        """A request was accepted, and may wait long before it is served; `ended` follows, once."""

    def loadable(self, request: KVRequest, num_cached_tokens: int) -> int | None:
        """Return how many leading tokens, in whole blocks, it could bring the K/V of.

        Asked for a request that is queued and has `num_cached_tokens` here; an answer no larger means that there is
        nothing to wait for. None: not known yet, ask again. Asking changes nothing.
        """
        return 0

    def load(self, request: KVRequest, runs: Sequence[BlockRun]) -> None:
        """Begin to fill blocks, which are kept for it until `finished` tells that the load has ended.

        `runs`: one for each KV group in which something is missing; a prefix is none without all of them.
        """
        raise AssertionError("there is nothing to load")

    def cancel(self, request_id: str) -> None:
        """The request needs its load no more; the load still ends, soon, in `finished`."""

    def wanted(self, request: KVRequest, runs: Sequence[BlockRun]) -> Sequence[BlockRun]:
        """Return those of the blocks that `save` is to be told of: without the others a request's window moves on."""
        return runs

    def save(self, request: KVRequest, runs: Sequence[BlockRun]) -> int | None:
        """Take note of blocks that are computed, or were found in the cache at admission; told again after preemption.

        Returns a number under which the blocks are kept as they are until `finished` names it; None: no need.
        """
        return None

    def relieve(self, num_blocks: int) -> None:
        """The pool lacks so many blocks while saves keep some: end saves early, where that can be.

        Told again, at each step, while it lasts.
        """

    def discard(self, request: KVRequest) -> None:
        """The K/V of a request may be wrong, whoever computed it: store none of it for others. `ended` follows."""

    def ended(self, request: KVRequest, completed: bool) -> int | None:
        """The request is over; `completed`: all of its prompt was computed and none of it is in doubt.

        Returns a number under which the answer of a completed request is held until `finished` names it; None: it need
        not be held.
        """
        return None

    def finished(self) -> TransfersDone:
        """Return what has ended since the last call."""
        return _NOTHING

    def reset(self) -> None:
        """Forget all stored K/V that no request waits for."""

    def drain(self) -> None:
        """The engine will end soon: take nothing on for others any more. What is under way goes on."""

    @property
    def num_owed(self) -> int:
        """Transfers to others, and to disk, that go on after their requests have ended; who ends waits for them."""
        return 0

    def stats(self) -> KVTransferStats:
        """Return totals and gauges of now."""
        return KVTransferStats()

    def close(self) -> None:
        """End all transfers and threads."""


class PagesCopy(Protocol):
    """A copy between pages and host memory that may still run."""

    def done(self) -> bool:
        """True once it has ended."""

    def wait(self) -> None:
        """Return once it has ended."""


class KVPages(Protocol):
    """One engine's pages as bytes. Safe to use from any thread; steps run meanwhile, on other blocks."""

    @property
    def bytes_per_block(self) -> int:
        """A block over all layers of its group, and all heads of the model."""

    @property
    def wants_pinned(self) -> bool:
        """Whether a device copies straight from and to host memory that is pinned."""

    @property
    def host(self) -> memoryview | None:
        """The whole pool as writable bytes, block after block, where the device is the host; else None."""

    def read(self, blocks: Sequence[int], into: memoryview) -> PagesCopy:
        """Copy whole blocks, in this order, to host memory."""

    def write(self, source: memoryview, blocks: Sequence[int]) -> PagesCopy:
        """Fill whole blocks, in this order, from host memory."""


@dataclass(frozen=True, slots=True)
class KVShard:
    """What one rank holds of each block."""

    layers: range
    """Its places for layers in a block of the model."""
    heads: range
    """Of keys and values; several ranks may hold the same ones."""
    vectors: int = 2
    """Of each token and layer: a key and a value; 1: a latent."""


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """One start of one engine."""

    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    """32 hexadecimal digits, drawn at each start."""
    fleet_key_file: str | None = None
    """File of the secret that the engines of one service share."""


@dataclass(frozen=True, slots=True)
class EngineSide:
    """One engine, as its connectors see it."""

    identity: EngineIdentity
    shape: KvShape
    """Of its blocks."""
    pages: KVPages
    """Of its worker."""
    num_blocks: int
    """Of its pool."""
    free_memory: int
    """Bytes of host memory that may be taken, within the limit of its container."""
    shards: Sequence[KVShard] = (KVShard(range(1), range(1), 1),)
    """Of each of its ranks."""
    steps_with_copies: bool = False
    """Its steps wait for those of other copies of the model."""


@dataclass(frozen=True, slots=True)
class BuiltConnector:
    """A connector, and where others may ask it for K/V."""

    connector: KVConnector
    port: int | None = None
    """Of its control socket; None: it has none."""
