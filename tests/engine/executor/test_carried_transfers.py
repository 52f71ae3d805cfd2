"""Ranks that launch transfers among their steps, on devices that run one kernel after another: both go on."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from pagefleet_engine.core.step import ScheduledRows, StepPlan
from pagefleet_engine.errors import EngineDead
from pagefleet_engine.executor.asked_pool import close_all
from pagefleet_engine.executor.messages import Carry, Launch, Loaded, encode
from pagefleet_engine.executor.node import Commands, RankNode
from pagefleet_engine.executor.rank_loop import BuiltRank, Launching, RankLoop, wait_on
from pagefleet_engine.executor.rank_pages import StepFence
from pagefleet_engine.executor.rank_turns import RankTurns
from pagefleet_engine.executor.ring import RingReader, RingWriter, make_ring
from pagefleet_engine.executor.trace import ThreadTrace
from pagefleet_engine.executor.vital_signs import OwnSigns, VitalSigns, make_signs
from pagefleet_engine.ranks.parallelism import Parallelism, RankPart
from pagefleet_engine.ranks.together import TogetherHandles, TurnBoard, make_together
from pagefleet_kv.p2p.data_plane import End as Side
from pagefleet_kv.p2p.data_plane import Frame, FrameArrived, Landing, LinkDown, PlaneEvent, Tell
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.link import Carriers
from pagefleet_kv.p2p.planes.device.opening import PlaneOpening
from pagefleet_kv.p2p.planes.device.ranked import RankedPlane
from pagefleet_kv.p2p.planes.device.words import TOKEN_BYTES, Go, decode_word
from pagefleet_kv.p2p.planes.local_device import LocalDevice
from pagefleet_kv.p2p.planes.nccl import communicator
from pagefleet_kv.p2p.planes.nccl.carrier import NcclCarriers
from pagefleet_kv.port import KVShard

from tests.fakes.byte_pages import PATIENCE_S
from tests.fakes.device_planes import Scene, TorchPool
from tests.fakes.kernel_queues import Kernel
from tests.fakes.plane_rank import PlaneRank
from tests.fakes.queued_nccl import QueuedNccl, QueuedWorld, StreamedCopies

LAYERS, HEADS, HEAD_BYTES, NUM_BLOCKS, NUM_FRAMES = 2, 2, 8, 24, 8
SIDES = {
    "one": [KVShard(range(LAYERS), range(HEADS))],
    "heads": [KVShard(range(LAYERS), range(head, head + 1)) for head in range(HEADS)],
    "layers": [KVShard(range(layer, layer + 1), range(HEADS)) for layer in range(LAYERS)],
}
BLOCKS = np.random.default_rng(0).integers(1, 256, (NUM_BLOCKS, LAYERS, 2, HEADS, HEAD_BYTES), np.uint8)
OPENING = PlaneOpening("nccl", b"c" * 32, 4, (4, 4), (4, 4))
LOADED = Loaded("", 2, 1, 1, 1, "", "", 1, 1, {})
TRANSFER = b"t" * 16
LAST = -1
"""Number of the step that ends a rank."""


class SummingWorker:
    """A rank whose steps are one sum of all, on its device."""

    idle_seconds = 0.0
    expert_load = None
    steps_together = False

    def __init__(self, launch: Callable[[int], Kernel]) -> None:
        self._launch = launch

    def launch(self, plan: StepPlan) -> Step:
        if plan.step_id == LAST:
            raise EngineDead("the end")
        return Step(self._launch(plan.step_id))

    def tell_of_layers(self, on_layer: Callable[[], None]) -> int:
        return 0


class Step:
    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    @property
    def is_computed(self) -> bool:
        return self._kernel.has_run

    def result(self) -> SimpleNamespace:
        return SimpleNamespace()


@dataclass(frozen=True)
class Among:
    """Which of the copies of a model, which step together, an engine is."""

    model: str
    num_ranks: int
    """Of all copies."""
    board: TurnBoard


class End:
    """An engine whose ranks are threads, as in `test_asked_planes`, and compute steps."""

    def __init__(self, name: str, shards: list[KVShard], world: QueuedWorld, among: Among | None = None) -> None:
        self.name, self.shards, self.world = name, shards, world
        self._model, self._num_ranks = (name, len(shards)) if among is None else (among.model, among.num_ranks)
        self.seen: list[PlaneEvent] = []
        self.num_launched = 0
        size = len(shards)
        rings, signs = make_ring(size, 1 << 16), make_signs(size)
        self._fds = [*rings.fds, signs]
        node = cast(RankNode, RingWriter(rings))
        self._commands = Commands([node])
        self._signs = VitalSigns(signs, size)
        self.fence = StepFence(lambda _: None, 2)
        self.pools: list[TorchPool] = []
        self.loops: list[threading.Thread] = []
        self._ranks: list[PlaneRank] = []
        for rank, shard in enumerate(shards):
            own = OwnSigns(signs, size, rank)
            pool = TorchPool(NUM_BLOCKS, len(shard.layers) * 2 * len(shard.heads) * HEAD_BYTES)
            self.pools.append(pool)
            device = LocalDevice(pool, {"nccl": partial(self._carriers, rank)})
            self._ranks.append(PlaneRank(device, partial(getattr, own, "num_finished"), self.fence))
            built = BuiltRank(
                SummingWorker(partial(self._sum, rank)),  # type: ignore[arg-type]
                LOADED,
                lambda: None,
                partial(self._carry, rank),
            )
            told = make_ring(1, 1 << 14)
            self._fds += told.fds
            part = RankPart(tensor=1)  # the second tells nobody anything
            loop = RankLoop(part, built, RingReader(rings, rank), RingWriter(told), own, ThreadTrace())
            self.loops.append(threading.Thread(target=self._run, args=(loop,), daemon=True))
            self.loops[-1].start()
        planes = [rank.asked.open(OPENING) for rank in self._ranks]
        whole = LAYERS * 2 * HEADS * HEAD_BYTES
        self.turns = CountedTurns(self._commands, lambda: False, None if among is None else among.board, "nccl")
        self.plane = RankedPlane("nccl", planes, self.turns, shards, whole, PATIENCE_S)

    @property
    def num_computed(self) -> int:
        return self._signs.num_finished

    def step(self) -> None:
        """Launch one more, unless there are two."""
        if self.num_launched - self.num_computed < 2:
            self.launch()

    def launch(self) -> None:
        """Launch one more."""
        self._say(self.num_launched)
        self.num_launched += 1
        self.fence.num_launched = self.num_launched

    def close(self) -> None:
        self.plane.close()
        self._say(LAST)
        for loop in self.loops:
            loop.join()
        for rank in self._ranks:
            rank.close()
        close_all(self._fds)

    def _say(self, step_id: int) -> None:
        self._commands.launch(encode(Launch(StepPlan(step_id, (), [], ScheduledRows.of([]), 4))), wait_on)

    def _carry(self, rank: int, command: Carry) -> Launching | None:
        turn = command.turns.get(rank)
        return None if turn is None else self._ranks[rank].server.launch(command.plane, turn)

    @staticmethod
    def _run(loop: RankLoop) -> None:
        with contextlib.suppress(EngineDead):
            loop.run()

    def _carriers(self, rank: int, copies: DeviceCopies, most: tuple[int, int]) -> Carriers:
        nccl = QueuedNccl(self.world, (self.name, rank))
        return NcclCarriers(nccl, cast(DeviceCopies, StreamedCopies(copies, self.world)), *most, PATIENCE_S)

    def _sum(self, rank: int, step_id: int) -> Kernel:
        kernel = self.world.queues.kernel((self._model, step_id), self._num_ranks)
        self.world.queues.launch((self.name, rank), kernel)
        return kernel


class CountedTurns(RankTurns):
    """Counts them."""

    num = 0

    def launch(self, turns: Mapping[int, int], end: Side) -> bool:
        has_launched = super().launch(turns, end)
        self.num += has_launched * len(turns)
        return has_launched


class Pair(Scene):
    """A source, which has blocks, and a target; both are at work while anything is awaited."""

    def __init__(self, source: str, target: str) -> None:
        self.world = QueuedWorld()
        self.p, self.d = (End(name, SIDES[kind], self.world) for name, kind in (("p", source), ("d", target)))
        super().__init__(self.p, self.d)  # type: ignore[arg-type]
        for shard, pool in zip(self.p.shards, self.p.pools, strict=True):
            pool.blocks[:] = torch.from_numpy(BLOCKS[_region(shard)].reshape(NUM_BLOCKS, -1))
        self.draw = random.Random(0)
        self.more: list[End] = []
        self.rests = False
        """Whether no steps are given."""
        self.longest_s = self.longest_watched_s = 0.0
        """That the source took for a step; the second without the time in which this process stood still."""
        self._num_seen, self._seen_at = 0, time.monotonic()
        self._watched_s, self._pumped_at = 0.0, self._seen_at
        self.join(self.p, self.d)  # type: ignore[arg-type]

    def add(self, name: str, target: str) -> End:
        """Join one more target."""
        made = self.ends[name] = End(name, SIDES[target], self.world)  # type: ignore[assignment]
        self.more.append(made)
        self.join(self.p, made)  # type: ignore[arg-type]
        return made

    def pump(self) -> None:
        super().pump()
        now = time.monotonic()
        self._watched_s += min(now - self._pumped_at, 0.1)
        self._pumped_at = now
        if self.rests or self.p.num_computed != self._num_seen:
            self._num_seen, self._seen_at, self._watched_s = self.p.num_computed, now, 0.0
        self.longest_s = max(self.longest_s, now - self._seen_at)
        self.longest_watched_s = max(self.longest_watched_s, self._watched_s)
        for end in (self.p, self.d):
            if len(end.shards) > 1 and not self.rests and self.draw.random() < 0.5:
                end.step()

    def close(self) -> None:
        super().close()
        for end in (self.p, self.d, *self.more):
            end.close()
        self.world.check_is_empty()

    def told(self, end: End, kind: type[PlaneEvent], count: int = 1) -> list[PlaneEvent]:
        return self.wait_for(end, kind, count)  # type: ignore[arg-type]

    def computes_on(self) -> None:
        """Steps go on in both engines."""
        ends = [end for end in (self.p, self.d) if len(end.shards) > 1]
        wanted = {end: end.num_computed + 4 for end in ends}
        self.until(lambda: all(end.num_computed >= wanted[end] for end in ends), "more steps")


def content_of(end: End) -> np.ndarray:
    whole = np.zeros_like(BLOCKS)
    for shard, pool in zip(end.shards, end.pools, strict=True):
        part = whole[_region(shard)]
        part[:] = pool.blocks.numpy().reshape(part.shape)
    return whole


def _region(shard: KVShard) -> tuple[slice, slice, slice, slice]:
    layers, heads = (slice(one.start, one.stop) for one in (shard.layers, shard.heads))
    return slice(None), layers, slice(None), heads


@pytest.fixture
def pairs() -> Iterator[Callable[[str, str], Pair]]:
    made: list[Pair] = []

    def make(source: str, target: str) -> Pair:
        made.append(Pair(source, target))
        return made[-1]

    yield make
    while made:
        made.pop().close()
    gc.collect()  # who asks planes has descriptors of its own


@pytest.mark.parametrize(
    ("source", "target"),
    [("heads", "one"), ("one", "heads"), ("heads", "heads"), ("layers", "heads"), ("heads", "layers")],
)
def test_frames_arrive_while_ranks_compute(pairs: Callable[[str, str], Pair], source: str, target: str) -> None:
    pair = pairs(source, target)
    order = [(5 * place) % NUM_BLOCKS for place in range(2 * NUM_FRAMES)]
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, order))
    for seq in range(NUM_FRAMES):
        pair.p.plane.send("d", Frame(TRANSFER, 1, seq, 2 * seq, [2 * seq, 2 * seq + 1]))
    pair.told(pair.d, FrameArrived, NUM_FRAMES)
    assert (content_of(pair.d)[order] == BLOCKS[: 2 * NUM_FRAMES]).all()
    pair.computes_on()


def _is_go(tell: Tell) -> bool:
    """Whether a rank's target says that it receives."""
    word = tell.data[5:]
    return len(word) > TOKEN_BYTES and tell.data[0] < 2 and isinstance(decode_word(word)[1], Go)


@pytest.mark.parametrize(("source", "target"), [("heads", "heads"), ("one", "heads")])
def test_a_receive_that_no_send_follows_stalls_steps_for_a_while_and_ends_its_link(
    pairs: Callable[[str, str], Pair], monkeypatch: pytest.MonkeyPatch, source: str, target: str
) -> None:
    monkeypatch.setattr(communicator, "IN_TURN_STALL_S", 0.5)
    pair = pairs(source, target)
    pair.lose = _is_go
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, [0, 1]))
    pair.p.plane.send("d", Frame(TRANSFER, 1, 0, 0, [2, 3]))
    down = pair.told(pair.d, LinkDown)[0]
    assert isinstance(down, LinkDown)
    assert down.reason == "the other rank was silent for too long"
    pair.told(pair.p, LinkDown)
    pair.computes_on()


def test_targets_that_stop_together_hold_steps_no_longer_than_one(
    pairs: Callable[[str, str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator, "IN_TURN_STALL_S", 6.0)  # a busy machine may stand still for seconds
    pair = pairs("heads", "one")
    other = pair.add("e", "one")
    pair.world.connects = False
    pair.lose = lambda tell: tell.peer == "p" and not _is_go(tell)
    for target in (pair.d, other):
        target.plane.land("p", Landing(TRANSFER, 1, 0, [0, 1]))
        pair.p.plane.send(target.name, Frame(TRANSFER, 1, 0, 0, [2, 3]))
    pair.rests = True
    pair.until(lambda: pair.p.turns.num == 2, "turns to send")
    pair.rests = False  # the next step comes behind both
    pair.told(pair.p, LinkDown, 2)
    pair.computes_on()
    assert pair.longest_s > 5.5
    assert pair.longest_watched_s < 11.5, "once, and not once after the other"


def test_links_that_end_in_the_middle_leave_no_turn_open(pairs: Callable[[str, str], Pair]) -> None:
    pair = pairs("heads", "heads")
    pair.d.plane.land("p", Landing(TRANSFER, 1, 0, list(range(2 * NUM_FRAMES))))
    for seq in range(NUM_FRAMES):
        pair.p.plane.send("d", Frame(TRANSFER, 1, seq, 2 * seq, [2 * seq, 2 * seq + 1]))
    pair.told(pair.d, FrameArrived, 2)
    pair.d.plane.disconnect("p", "target")
    pair.told(pair.p, LinkDown)
    pair.computes_on()
    order = pair.d.plane._order
    assert not order._receives
    assert not order._under_way


class Copies(Scene):
    """Two models, of which one sends and the other receives, each with copies that step together."""

    def __init__(self, sources: list[str], targets: list[str]) -> None:
        self.world = QueuedWorld()
        self.draw = random.Random(0)
        self._handles: list[TogetherHandles] = []
        self.models = [self._model("p", sources), self._model("d", targets)]
        self.sources, self.targets = self.models
        super().__init__(*self.sources, *self.targets)  # type: ignore[arg-type]
        for source in self.sources:
            for shard, pool in zip(source.shards, source.pools, strict=True):
                pool.blocks[:] = torch.from_numpy(BLOCKS[_region(shard)].reshape(NUM_BLOCKS, -1))
            for target in self.targets:
                self.join(source, target)  # type: ignore[arg-type]

    def _model(self, name: str, kinds: list[str]) -> list[End]:
        if len(kinds) == 1:
            return [End(name, SIDES[kinds[0]], self.world)]
        handles = make_together(Parallelism(data_parallel_size=len(kinds), enable_expert_parallel=True))
        self._handles.append(handles)
        num_ranks = sum(len(SIDES[kind]) for kind in kinds)
        return [
            End(f"{name}{copy}", SIDES[kind], self.world, Among(name, num_ranks, TurnBoard(handles, copy)))
            for copy, kind in enumerate(kinds)
        ]

    def pump(self) -> None:
        super().pump()
        for model in self.models:
            for end in model:
                if (len(model) > 1 or len(end.shards) > 1) and self.draw.random() < 0.5:
                    end.step()

    def computes_on(self) -> None:
        """Steps go on in all copies."""
        ends = [end for model in self.models for end in model if len(model) > 1 or len(end.shards) > 1]
        wanted = {end: end.num_computed + 4 for end in ends}
        self.until(lambda: all(end.num_computed >= wanted[end] for end in ends), "more steps")

    def close(self) -> None:
        super().close()
        for model in self.models:
            num_launched = max(end.num_launched for end in model)
            for end in model:
                while end.num_launched < num_launched:
                    end.launch()
        for model in self.models:
            for end in model:
                end.close()
        self.world.check_is_empty()
        for handles in self._handles:
            handles.close()


@pytest.fixture
def copies() -> Iterator[Callable[[list[str], list[str]], Copies]]:
    made: list[Copies] = []

    def make(sources: list[str], targets: list[str]) -> Copies:
        made.append(Copies(sources, targets))
        return made[-1]

    yield make
    while made:
        made.pop().close()
    gc.collect()  # as above


def send_all(scene: Copies) -> None:
    """Frames from each source to each target, of blocks of their own."""
    each = NUM_BLOCKS // len(scene.sources)
    for target in scene.targets:
        for number, source in enumerate(scene.sources):
            blocks, transfer = range(number * each, (number + 1) * each), bytes([number]) * 16
            target.plane.land(source.name, Landing(transfer, 1, 0, list(blocks)))
            for seq, first in enumerate(range(0, each, 2)):
                source.plane.send(target.name, Frame(transfer, 1, seq, first, [blocks[first], blocks[first + 1]]))


@pytest.mark.parametrize(
    ("sources", "targets"),
    [(["one"], ["one", "one"]), (["one", "one"], ["one", "one"]), (["heads", "heads"], ["layers", "heads"])],
)
def test_copies_that_step_together_pass_frames_while_they_compute(
    copies: Callable[[list[str], list[str]], Copies], sources: list[str], targets: list[str]
) -> None:
    scene = copies(sources, targets)
    send_all(scene)
    for target in scene.targets:
        scene.wait_for(target, FrameArrived, NUM_BLOCKS // 2)  # type: ignore[arg-type]
        assert (content_of(target) == BLOCKS).all()
    scene.computes_on()
