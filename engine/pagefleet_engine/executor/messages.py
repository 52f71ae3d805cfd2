"""What crosses between the executor and its rank processes: msgspec structs as msgpack, large arrays behind them.

A rank does what it is told in order: launch, sample, take. So each step has the calls that it would have in the core's
own process, and no rank waits for another but in the model. Ranks take by themselves, as soon as there is something,
where the next command must not wait for a step: stages of a pipeline, as it may be a launch that waits for another
stage, and ranks that launch transfers of K/V among the steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import msgspec
import numpy as np
from pagefleet_protocol.load_progress import LoadPhase
from pagefleet_protocol.version import VERSION

from pagefleet_engine.config import EngineConfig
from pagefleet_engine.core.step import ExpertLoad, Int64Array, StepMasks, StepPlan, StepResult
from pagefleet_engine.errors import ConfigError, ModelLoadError
from pagefleet_engine.executor.ring import Buffer, RingHandles, RingPair
from pagefleet_engine.ranks.parallelism import RankPart
from pagefleet_engine.ranks.shared_handles import SharedHandles
from pagefleet_engine.ranks.together import CopyShares


class RankShares(msgspec.Struct, frozen=True, array_like=True):
    """Memory that a rank shares with some of the others; None: with nobody there, or not with all that belong to it."""

    tensor: SharedHandles | None = None
    """With the ranks that its layers are divided among."""
    world: SharedHandles | None = None
    """With all, where there are several stages."""
    inlet: RingHandles | None = None
    """With the one that sends it hidden states."""
    outlet: RingHandles | None = None
    """With the one to which it sends them."""

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors."""
        return tuple(
            fd for one in (self.tensor, self.world, self.inlet, self.outlet) if one is not None for fd in one.fds
        )


class RankStart(msgspec.Struct, frozen=True):
    """What a new rank process is told, as a line of JSON on its standard input."""

    rank: int
    """Its number."""
    size: int
    """Of all ranks."""
    place: int
    """Among those of its machine."""
    num_places: int
    sentinel: int
    """Descriptor that the executor watches: it closes when the process ends, however it ends."""
    config: EngineConfig
    num_threads: int
    """Of a CPU that are this rank's."""
    folder: str
    """Of the model."""
    cores: Sequence[int]
    """That it may use; none: those of the executor."""
    log_level: int
    commands: RingHandles
    replies: RingHandles
    signs: int
    """Descriptor of the memory that its signs of life are in."""
    shared: RankShares
    """What ranks that compute on CPUs of one machine exchange tensors through."""
    copy_shares: CopyShares | None
    """What it has in common with ranks of other copies of the model, where they step together."""
    store: int
    """Descriptor of the socket on which others ask the `Rendezvous`."""
    address: str
    """Of this machine, by which ranks of others reach this one; empty: there are none."""
    pool: int
    """Descriptor of the memory for its KV pool, or for what is on its way there from a GPU's; -1: nobody else reaches
    the pool."""
    copies: RingPair | None
    """Rings by which it is asked to copy blocks, where its pool is on a GPU and others reach it."""
    planes: RingPair | None
    """Rings by which it is asked to open planes of connectors on its GPU; None: nobody does."""

    @property
    def fds(self) -> tuple[int, ...]:
        """All descriptors that the process inherits."""
        pairs = [pair for pair in (self.copies, self.planes) if pair is not None]
        rings = (*self.commands.fds, *self.replies.fds, *(fd for pair in pairs for fd in pair.fds))
        pool = () if self.pool < 0 else (self.pool,)
        copies = () if self.copy_shares is None else self.copy_shares.fds
        return (self.sentinel, self.signs, self.store, *rings, *pool, *self.shared.fds, *copies)

    @property
    def part(self) -> RankPart:
        """Which part of the model it has."""
        return self.config.parallel.part(self.rank)

    @property
    def name(self) -> str:
        """Of the rank, for the log."""
        return self.config.parallel.name(self.rank, None if self.copy_shares is None else self.copy_shares.copy)


class Launch(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """`worker.launch(plan)`."""

    plan: StepPlan


class Sample(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """`sample` of the step launched last; the masks follow as arrays."""

    rows: Sequence[int]
    has_likeliest: bool


class Take(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """`result` of the oldest step."""


class StartTrace(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Record the steps from now on; all that were launched are taken. Answered by `Traced`."""


class StopTrace(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Write down what was recorded; all steps are taken. Answered by `Traced`."""

    stem: str
    """How the file's path begins; empty: forget it."""


class Carry(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Launch transfers of K/V whose kernels wait for other engines', here among the steps: see `device.turns`."""

    plane: str
    turns: Mapping[int, int]
    """By rank, the one that asked; the others do nothing."""


Command = Launch | Sample | Take | StartTrace | StopTrace | Carry


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The rank has its part of the model, and computes."""

    digest: str
    """Of its configuration and code."""
    max_in_flight: int
    num_blocks: int
    block_size: int
    bytes_per_block: int
    dtype: str
    cache_dtype: str
    context_length: int
    max_model_len: int
    seconds: Mapping[LoadPhase, float]
    """That its phases took."""


StartFault = Literal["config", "model", "memory", "other"]


class StartFailed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The rank could not load, and ends."""

    fault: StartFault
    message: str

    def error(self, name: str) -> ConfigError:
        """Return what to raise of a rank of that name."""
        kind = ModelLoadError if self.fault in ("model", "memory") else ConfigError
        return kind(f"{name}: {self.message}")


class Computed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The step, launched last, has only its masked rows to sample."""

    step_id: int


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What a step gave; only one rank of those that sample tells it."""

    step_id: int
    result: StepResult
    idle_seconds: float
    expert_load: ExpertLoad | None


class StepFailed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The step failed on this rank. Every rank of its stage tells it, and at once: others may wait for it in the
    model."""

    step_id: int
    out_of_memory: bool
    message: str


class Traced(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The answer to a message about a trace."""

    refused: str = ""
    """Why it was not done; empty: it was."""


Reply = Loaded | StartFailed | Computed | Taken | StepFailed | Traced


def digest(config: EngineConfig) -> str:
    """Return what must be the same for all ranks of an engine: its configuration, and the version of the code. Each
    machine has a cache_dir of its own."""
    alike = replace(config, execution=replace(config.execution, cache_dir=None))
    text = _encoder.encode((alike, VERSION))
    return hashlib.sha256(text).hexdigest()


def _bytes_of(column: object) -> memoryview:
    assert isinstance(column, np.ndarray)
    return column.data


def _column(_: type, words: bytes) -> Int64Array:
    return np.frombuffer(words, np.int64)


_encoder = msgspec.msgpack.Encoder(enc_hook=_bytes_of)
_commands = msgspec.msgpack.Decoder(Command, dec_hook=_column)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(message: Launch | Take | StartTrace | StopTrace | Carry | Reply) -> list[Buffer]:
    """Return the parts of a message."""
    return [_encoder.encode(message)]


def encode_sample(masks: StepMasks) -> list[Buffer]:
    """Return the parts of a message: `Sample`, and the masks as they lie in memory."""
    likeliest = masks.if_likeliest
    arrays = [masks.allowed] if likeliest is None else [masks.allowed, likeliest]
    head = Sample(masks.rows, likeliest is not None)
    # Not `cast`, which refuses masks of no rows: those of a step that all masked rows sit out.
    return [_encoder.encode(head), *(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays)]


def decode_command(parts: Sequence[Buffer]) -> Launch | StepMasks | Take | StartTrace | StopTrace | Carry:
    """Return what a rank is told; masks are views of the message."""
    command: Command = _commands.decode(parts[0])
    if not isinstance(command, Sample):
        return command
    num_rows = len(command.rows)
    flat = [np.frombuffer(part, np.int32) for part in parts[1:]]
    allowed, *likeliest = (words.reshape(num_rows, len(words) // num_rows if num_rows else 0) for words in flat)
    return StepMasks(command.rows, allowed, likeliest[0] if command.has_likeliest else None)


def decode_reply(parts: Sequence[Buffer]) -> Reply:
    """Return what a rank tells."""
    return _replies.decode(parts[0])
