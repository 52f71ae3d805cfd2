"""Prefill and decode engines of the K/V protocol in one memory: real state machines, pools of bytes, and a network
that does to every message and frame what a test wants.

Whatever must never happen is asserted where it would happen: a write outside a live reservation, a save unpinned twice,
a load that ends twice or is published with other bytes than the prefill engine computed. Freed blocks are overwritten
at once and used again soon, so whoever still reads or writes them is found out.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from pagefleet_kv.p2p.data_plane import (
    FrameArrived,
    FrameRefused,
    FrameSent,
    Landed,
    Landing,
    LinkDown,
    LinkUp,
    PlaneEvent,
    Withdrawn,
)
from pagefleet_kv.p2p.planes.landing import FrameName, Landings
from pagefleet_kv.p2p.transfer.actions import (
    Connect,
    Dial,
    DropSpill,
    HangUp,
    LegSettled,
    LoadEnded,
    OnPlane,
    Send,
    SendFrame,
    SourceAction,
    Spill,
    TargetAction,
    Unpin,
)
from pagefleet_kv.p2p.transfer.incoming import LoadJob
from pagefleet_kv.p2p.transfer.settings import P2PSettings
from pagefleet_kv.p2p.transfer.source import Source
from pagefleet_kv.p2p.transfer.target import Target
from pagefleet_kv.port import BlockRun
from pagefleet_protocol.block_hash import BlockHash
from pagefleet_protocol.kv_blob import HEADER_BYTES, BlobError, BlobHeader, KvShape, decode_header
from pagefleet_protocol.kv_control import ControlMessage, KvControlError, encode
from pagefleet_protocol.kv_control import decode as decode_message

BLOCK_BYTES = 8
SHAPE = KvShape(
    model="0" * 64,
    cache_dtype="float32",
    compute_dtype="float32",
    block_size=16,
    num_layers=1,
    num_kv_heads=1,
    head_dim=1,
    layout="nlkhbd",
)


def content(prompt: int, index: int) -> bytes:
    """Return the K/V of one block of a prompt."""
    return hashlib.sha256(b"%d/%d" % (prompt, index)).digest()[:BLOCK_BYTES]


def block_hash(prompt: int, index: int) -> BlockHash:
    """Return what names the prompt up to this block."""
    return BlockHash(hashlib.sha256(b"hash %d/%d" % (prompt, index)).digest())


class Pool:
    """Numbered blocks. Free ones hold garbage, and the one that was freed last is taken first."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [b"garbage!"] * num_blocks
        self.free = list(range(num_blocks))

    def take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            assert block not in self.free
            self.blocks[block] = b"garbage!"
            self.free.append(block)


@dataclass(eq=False)
class Leg:
    """A prefill request."""

    transfer_id: bytes
    prompt: int
    num_blocks: int
    computed: int = 0
    over: bool = False


class Prefill:
    """One life of a prefill engine."""

    def __init__(self, address: str, incarnation: str, settings: P2PSettings, net: Net, shape: KvShape = SHAPE) -> None:
        self.address = address
        self.incarnation = incarnation
        self.net = net
        self.shape = shape
        self.source = Source(settings, shape, incarnation, {"tcp": self._invite})
        self.pool = Pool(512)
        self.pins: dict[int, list[int]] = {}
        self.spills: dict[int, list[bytes]] = {}
        self.copying: list[Spill] = []
        self.queue: list[SendFrame] = []
        self.reading: SendFrame | None = None
        """A frame whose first byte was read, and not its last."""
        self.read_withdrawn = False
        self.events: deque[PlaneEvent] = deque()
        self.legs: dict[bytes, Leg] = {}
        self.settled: dict[bytes, LegSettled] = {}
        self.alive = True
        self._num_saves = 0

    def _invite(self, peer: str) -> bytes:
        return f"{self.incarnation}/{peer}".encode()

    def begin(self, leg: Leg, peer_incarnation: str) -> None:
        self.legs[leg.transfer_id] = leg
        self.do(self.source.begin(leg.transfer_id, peer_incarnation, self.net.now))

    def save(self, leg: Leg, first: int, count: int) -> None:
        blocks = self.pool.take(count)
        hashes = [block_hash(leg.prompt, first + i) for i in range(count)]
        for i, block in enumerate(blocks):
            self.pool.blocks[block] = content(leg.prompt, first + i)
        self._num_saves += 1
        self.pins[self._num_saves] = blocks
        leg.computed = max(leg.computed, first + count)
        run = BlockRun(first, blocks, hashes)
        self.do(self.source.save(leg.transfer_id, self._num_saves, run, self.net.now))

    def end(self, leg: Leg, completed: bool) -> None:
        leg.over = True
        self.do(self.source.ended(leg.transfer_id, completed, self.net.now))

    def end_copy(self, good: bool) -> None:
        if not self.copying:
            return
        spill = self.copying.pop(0)
        if good:
            self.spills[spill.number] = [self.pool.blocks[block] for block in spill.blocks]
            self.do(self.source.spilled(spill.number, self.net.now))
        else:
            self.do(self.source.spill_failed(spill.number, self.net.now))

    def pass_event(self) -> None:
        if self.events:
            self.do(self.source.plane_event(self.events.popleft(), self.net.now))

    def do(self, actions: Sequence[SourceAction]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.net.from_prefill(self, action.peer, action.message)
            elif isinstance(action, SendFrame):
                self.queue.append(action)
            elif isinstance(action, OnPlane):
                self._on_plane(action)
            elif isinstance(action, Spill | DropSpill | Unpin):
                self._in_memory(action)
            elif isinstance(action, LegSettled):
                assert action.transfer_id not in self.settled
                self.settled[action.transfer_id] = action

    def _on_plane(self, action: OnPlane) -> None:
        match action.method, action.arguments:
            case "withdraw", (bytes(transfer_id),):
                self.queue = [frame for frame in self.queue if frame.transfer_id != transfer_id]
                if self.reading is not None and self.reading.transfer_id == transfer_id:
                    self.read_withdrawn = True
                else:
                    self.events.append(Withdrawn(transfer_id))
            case "disconnect", (str(peer), "source"):
                self.net.break_link(self.incarnation, peer, "disconnected", tell_prefill=False)
            case _:
                raise AssertionError(f"a source asks for {action}")

    def _in_memory(self, action: Spill | DropSpill | Unpin) -> None:
        if isinstance(action, Spill):
            self.copying.append(action)
        elif isinstance(action, DropSpill):
            del self.spills[action.number]
        else:
            self.pool.give_back(self.pins.pop(action.save))

    def stop_reading(self, peer: str) -> None:
        if self.reading is None or self.reading.peer != peer:
            return
        if self.read_withdrawn:
            self.events.append(Withdrawn(self.reading.transfer_id))
        self.reading, self.read_withdrawn = None, False

    def read(self, frame: SendFrame) -> bytes:
        piece = frame.piece
        if piece.blocks:
            pinned = {block for blocks in self.pins.values() for block in blocks}
            assert pinned.issuperset(piece.blocks), "it reads blocks that it gave back"
            return b"".join(self.pool.blocks[block] for block in piece.blocks)
        held = self.spills[piece.spill]
        return b"".join(held[piece.spill_offset : piece.spill_offset + piece.count])


@dataclass(eq=False)
class Writing:
    """A frame whose first byte was read, and not its last."""

    prefill: str
    header: BlobHeader
    payload: bytes
    blocks: Sequence[int]
    forgotten: bool = False


class Decode:
    """One life of a decode engine."""

    def __init__(self, name: str, incarnation: str, settings: P2PSettings, net: Net, shape: KvShape = SHAPE) -> None:
        self.name = name
        self.incarnation = incarnation
        self.net = net
        self.shape = shape
        self.target = Target(settings, shape, incarnation, ["tcp"])
        self.pool = Pool(256)
        self.landings = Landings()
        self.landed_in: dict[bytes, Sequence[int]] = {}
        """Blocks that frames of a transfer may be written to."""
        self.writing: dict[str, Writing] = {}
        self.jobs: dict[str, tuple[LoadJob, int]] = {}
        """Loads that have not ended, and their prompts."""
        self.ended: dict[str, LoadEnded] = {}
        self.events: deque[PlaneEvent] = deque()
        self.dialled: set[str] = set()
        self.key = 0
        """Changes as the control connection is lost and made again."""
        self.alive = True

    def load(self, job: LoadJob, prompt: int) -> None:
        self.jobs[job.request_id] = (job, prompt)
        self.do(self.target.load(job, self.net.now))

    def pass_event(self) -> None:
        if self.events:
            self.do(self.target.plane_event(self.events.popleft(), self.net.now))

    def do(self, actions: Sequence[TargetAction]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.net.from_decode(self, action.peer, action.message)
            elif isinstance(action, Dial):
                self.dialled.add(action.peer)
            elif isinstance(action, HangUp):
                self.dialled.discard(action.peer)
            elif isinstance(action, Connect):
                self.net.connect(self, action)
            elif isinstance(action, OnPlane):
                self._on_plane(action)
            elif isinstance(action, LoadEnded):
                self._load_ended(action)

    def _on_plane(self, action: OnPlane) -> None:
        match action.method, action.arguments:
            case "disconnect", (str(peer), "target"):
                self.net.break_link(peer, self.incarnation, "disconnected", tell_decode=False)
            case "land", (str(peer), Landing() as landing):
                assert landing.transfer_id not in self.landed_in
                self.landings.add(peer, landing)
                self.landed_in[landing.transfer_id] = landing.blocks
            case "forget", (bytes(transfer_id),):
                self._forget(transfer_id)
            case _:
                raise AssertionError(f"a target asks for {action}")

    def _forget(self, transfer_id: bytes) -> None:
        self.landings.remove(transfer_id)
        for writing in self.writing.values():
            if FrameName.decode(writing.header.name).transfer_id == transfer_id:
                writing.forgotten = True
                return
        self._landed(transfer_id)

    def _landed(self, transfer_id: bytes) -> None:
        del self.landed_in[transfer_id]
        self.events.append(Landed(transfer_id))

    def _load_ended(self, ended: LoadEnded) -> None:
        job, prompt = self.jobs.pop(ended.request_id)
        assert ended.request_id not in self.ended
        writable = {block for blocks in self.landed_in.values() for block in blocks}
        assert writable.isdisjoint(job.blocks), "something may still write to its blocks"
        self.ended[ended.request_id] = ended
        if ended.num_blocks:
            assert ended.num_blocks == len(job.blocks)
            assert ended.failure is None
            here = [self.pool.blocks[block] for block in job.blocks]
            assert here == [content(prompt, job.first_block + i) for i in range(len(job.blocks))], "wrong K/V"
        self.pool.give_back(job.blocks)

    def begin_frame(self, prefill: str, data: bytes) -> None:
        try:
            header = decode_header(data, self.shape.compatibility, BLOCK_BYTES)
        except BlobError as error:
            self.net.break_link(prefill, self.incarnation, str(error))
            return
        payload = data[HEADER_BYTES:]
        placed = self.landings.place(prefill, header)
        if isinstance(placed, str):
            self._refuse(prefill, header, placed)
            return
        self.writing[prefill] = Writing(prefill, header, payload, list(placed))
        self._write(placed, payload[: len(payload) // 2], header)

    def end_frame(self, prefill: str) -> None:
        writing = self.writing.pop(prefill, None)
        if writing is None:
            return
        header = writing.header
        name = FrameName.decode(header.name)
        if writing.forgotten:
            self._landed(name.transfer_id)
            return
        self._write(writing.blocks, writing.payload, header)
        if len(writing.payload) != header.num_bytes:
            self.net.break_link(prefill, self.incarnation, "it ended early")
        elif zlib.crc32(writing.payload) != header.checksum:
            self._refuse(prefill, header, "damaged")
        else:
            self.landings.landed(prefill, header)
            place = (header.first_block, header.num_blocks, header.num_bytes, header.checksum)
            self.events.append(FrameArrived(prefill, name.transfer_id, name.epoch, name.seq, *place))

    def stop_writing(self, prefill: str) -> None:
        writing = self.writing.pop(prefill, None)
        if writing is not None and writing.forgotten:
            self._landed(FrameName.decode(writing.header.name).transfer_id)

    def _refuse(self, prefill: str, header: BlobHeader, reason: str) -> None:
        name = FrameName.decode(header.name)
        self.events.append(FrameRefused(prefill, name.transfer_id, name.epoch, name.seq, reason))

    def _write(self, blocks: Sequence[int], payload: bytes, header: BlobHeader) -> None:
        own = self.landed_in[FrameName.decode(header.name).transfer_id]
        for i, block in enumerate(blocks):
            assert block in own, "a frame outside its reservation"
            piece = payload[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES]
            self.pool.blocks[block] = piece + self.pool.blocks[block][len(piece) :]


@dataclass(eq=False)
class Letter:
    """A control message under way."""

    to_prefill: bool
    address: str
    decode: Decode
    key: str
    data: bytes


@dataclass(eq=False)
class Net:
    """All engines, and what is under way between them."""

    settings: P2PSettings
    now: float = 100.0
    letters: list[Letter] = field(default_factory=list)
    prefills: dict[str, Prefill] = field(default_factory=dict)
    """By address."""
    decodes: dict[str, Decode] = field(default_factory=dict)
    """By name."""
    links: dict[tuple[str, str], deque[bytes]] = field(default_factory=dict)
    """Frames under way, by the incarnations of the two ends."""
    cut: set[tuple[str, str]] = field(default_factory=set)
    """Address and name of engines whose control messages are all lost."""
    max_letters: int = 10_000
    _num_lives: int = 0

    def _incarnation(self) -> str:
        self._num_lives += 1
        return f"{self._num_lives:032x}"

    def start_prefill(self, address: str, shape: KvShape = SHAPE) -> Prefill:
        self.prefills[address] = Prefill(address, self._incarnation(), self.settings, self, shape)
        return self.prefills[address]

    def start_decode(self, name: str, shape: KvShape = SHAPE) -> Decode:
        self.decodes[name] = Decode(name, self._incarnation(), self.settings, self, shape)
        return self.decodes[name]

    def crash_prefill(self, address: str) -> Prefill:
        """End one without a word, and start another in its place."""
        old = self.prefills[address]
        old.alive = False
        for pair in [pair for pair in self.links if pair[0] == old.incarnation]:
            self.break_link(*pair, "reset")
        return self.start_prefill(address)

    def crash_decode(self, name: str) -> Decode:
        """End one without a word, and start another in its place."""
        old = self.decodes[name]
        old.alive = False
        for pair in [pair for pair in self.links if pair[1] == old.incarnation]:
            self.break_link(*pair, "reset")
        return self.start_decode(name)

    # control messages

    def from_decode(self, decode: Decode, address: str, message: ControlMessage) -> None:
        data = encode(message, decode.shape.compatibility)
        self._post(Letter(True, address, decode, f"{decode.incarnation}-{decode.key}", data))

    def from_prefill(self, prefill: Prefill, key: str, message: ControlMessage) -> None:
        for decode in self.decodes.values():
            if f"{decode.incarnation}-{decode.key}" == key:
                data = encode(message, prefill.shape.compatibility)
                self._post(Letter(False, prefill.address, decode, key, data))

    def _post(self, letter: Letter) -> None:
        assert len(self.letters) < self.max_letters, "somebody does not stop talking"
        self.letters.append(letter)

    def deliver(self, letter: Letter) -> None:
        """Hand a message over, if there is still somebody to take it."""
        decode_engine = letter.decode
        lost = (letter.address, decode_engine.name) in self.cut or not decode_engine.alive
        if lost or letter.address not in decode_engine.dialled:
            return
        prefill = self.prefills.get(letter.address)
        if letter.to_prefill and prefill is not None:
            prefill.do(self._at_prefill(prefill, letter))
        elif not letter.to_prefill and letter.key == f"{decode_engine.incarnation}-{decode_engine.key}":
            decode_engine.do(self._at_decode(decode_engine, letter))

    def _at_prefill(self, prefill: Prefill, letter: Letter) -> Sequence[SourceAction]:
        try:
            message = decode_message(letter.data, prefill.shape.compatibility)
        except KvControlError as error:
            return prefill.source.refused(letter.key, error)
        return prefill.source.message(letter.key, message, self.now)

    def _at_decode(self, engine: Decode, letter: Letter) -> Sequence[TargetAction]:
        try:
            message = decode_message(letter.data, engine.shape.compatibility)
        except KvControlError as error:
            return engine.target.refused(letter.address, error, self.now)
        return engine.target.message(letter.address, message, self.now)

    # frames

    def connect(self, decode: Decode, wanted: Connect) -> None:
        prefill = self.prefills.get(wanted.at)
        invited = prefill is not None and wanted.invitation == f"{prefill.incarnation}/{decode.incarnation}".encode()
        if prefill is None or not invited or (wanted.at, decode.name) in self.cut:
            decode.events.append(LinkDown(wanted.peer, "target", "refused"))
            return
        if (prefill.incarnation, decode.incarnation) in self.links:  # P has not noticed that the old one is gone
            self.break_link(prefill.incarnation, decode.incarnation, "replaced", tell_decode=False)
        self.links[prefill.incarnation, decode.incarnation] = deque()
        prefill.events.append(LinkUp(decode.incarnation, "source"))
        decode.events.append(LinkUp(prefill.incarnation, "target"))

    def break_link(
        self, prefill: str, decode: str, reason: str, *, tell_prefill: bool = True, tell_decode: bool = True
    ) -> None:
        """Lose a data connection and all that is on it. `prefill` and `decode` are incarnations."""
        stood = self.links.pop((prefill, decode), None) is not None
        for source in self.prefills.values():
            if source.incarnation == prefill:  # what it was given without a link ends too
                source.queue = [frame for frame in source.queue if frame.peer != decode]
                source.stop_reading(decode)
                if stood and tell_prefill:
                    source.events.append(LinkDown(decode, "source", reason))
        if not stood:
            return
        for target in self.decodes.values():
            if target.incarnation == decode:
                target.stop_writing(prefill)
                if tell_decode:
                    target.events.append(LinkDown(prefill, "target", reason))

    def send_frame(self, prefill: Prefill) -> None:
        """Let a prefill engine's plane read a frame and put it on the wire, or begin with the oldest."""
        frame, prefill.reading = prefill.reading, None
        if frame is None:
            prefill.reading = prefill.queue.pop(0) if prefill.queue else None
            return
        payload = prefill.read(frame)
        if prefill.read_withdrawn:
            prefill.read_withdrawn = False
            prefill.events.append(Withdrawn(frame.transfer_id))
            return
        wire = self.links.get((prefill.incarnation, frame.peer))
        if wire is None:
            prefill.queue = [other for other in prefill.queue if other.peer != frame.peer]
            prefill.events.append(LinkDown(frame.peer, "source", "there is no connection"))
            return
        name = FrameName(frame.transfer_id, frame.epoch, frame.seq).encode()
        check = zlib.crc32(payload)
        header = BlobHeader(
            prefill.shape.compatibility, name, frame.piece.first, frame.piece.count, len(payload), check
        )
        wire.append(header.encode() + payload)
        prefill.events.append(FrameSent(frame.peer, frame.transfer_id, frame.epoch, frame.seq, len(payload), check))

    def take_frame(self, pair: tuple[str, str]) -> None:
        """Let a decode engine's plane finish a frame, or begin the next one."""
        target = next((d for d in self.decodes.values() if d.incarnation == pair[1]), None)
        if target is None:
            return
        if pair[0] in target.writing:
            target.end_frame(pair[0])
        elif self.links.get(pair):
            target.begin_frame(pair[0], self.links[pair].popleft())

    # time

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for prefill in self.prefills.values():
            prefill.do(prefill.source.tick(self.now))
        for decode in self.decodes.values():
            decode.do(decode.target.tick(self.now))

    def run_quiet(self, rounds: int = 400) -> None:
        """Deliver everything that is under way, and what comes of it."""
        for _ in range(rounds):
            if not self.one_round():
                return
        raise AssertionError("it never becomes quiet")

    def one_round(self) -> bool:
        """Move everything one step; False: there was nothing to move."""
        letters, self.letters = self.letters, []
        busy = bool(letters)
        for letter in letters:
            self.deliver(letter)
        for prefill in list(self.prefills.values()):
            busy |= bool(prefill.queue or prefill.reading or prefill.events or prefill.copying)
            self.send_frame(prefill)
            prefill.pass_event()
            prefill.end_copy(True)
        for pair in list(self.links):
            target = next((d for d in self.decodes.values() if d.incarnation == pair[1]), None)
            busy |= bool(self.links[pair]) or (target is not None and pair[0] in target.writing)
            self.take_frame(pair)
        for decode in list(self.decodes.values()):
            busy |= bool(decode.events)
            decode.pass_event()
        return busy

    def run(self, seconds: float, step: float = 0.25) -> None:
        """Let time pass on a network without faults."""
        until = self.now + seconds
        self.run_quiet()
        while self.now < until:
            self.tick(step)
            self.run_quiet()


def forge(data: bytes, compatibility: bytes) -> bytes:
    """Return a frame of other bytes, whose own check sums are right."""
    header = decode_header(data, compatibility, BLOCK_BYTES)
    payload = bytes(255 - byte for byte in data[HEADER_BYTES:])
    return replace(header, checksum=zlib.crc32(payload)).encode() + payload


def spoil(data: bytes, seed: int) -> bytes:
    """Return the bytes with one bit turned."""
    at = random.Random(seed).randrange(len(data) * 8)
    spoiled = bytearray(data)
    spoiled[at // 8] ^= 1 << (at % 8)
    return bytes(spoiled)
