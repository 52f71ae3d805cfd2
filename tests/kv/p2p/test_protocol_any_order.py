"""Random transfers between engines that crash, on a network that delays, loses, doubles, reorders, cuts and damages.

What may never happen is asserted by the network and the engines in `tests.fakes.kv_p2p` as it happens. At the end the
network is well again and time passes: then every request must have ended and nobody may hold anything.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Literal

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pagefleet_kv.p2p.transfer.incoming import LoadJob
from pagefleet_kv.p2p.transfer.settings import P2PSettings, SendType
from pagefleet_protocol.kv_blob import BlobError

from tests.example_counts import examples
from tests.fakes.kv_p2p import BLOCK_BYTES, SHAPE, Decode, Leg, Letter, Net, Prefill, block_hash, forge, spoil

ADDRESSES = ("p:1", "p:2")
NAMES = ("d1", "d2")
BUFFER_BLOCKS = 8
OVERFLOW_BLOCKS = 6
MAX_TRANSFERS = 12
pick = st.integers(0, 10_000)
rarely = st.sampled_from([False] * 4 + [True])


class AnyOrder(RuleBasedStateMachine):
    @initialize(send_type=st.sampled_from(["put_async", "put", "get"]), frame_blocks=st.integers(1, 4))
    def start(self, send_type: SendType, frame_blocks: int) -> None:
        self.config = P2PSettings(
            block_bytes=BLOCK_BYTES,
            send_type=send_type,
            buffer_bytes=BUFFER_BLOCKS * BLOCK_BYTES,
            overflow_bytes=OVERFLOW_BLOCKS * BLOCK_BYTES,
            frame_bytes=frame_blocks * BLOCK_BYTES,
            recompute_budget=300,
            max_early_reserves=3,
            max_tombstones=6,
            max_sessions=3,
        )
        self.net = Net(self.config)
        for address in ADDRESSES:
            self.net.start_prefill(address)
        for name in NAMES:
            self.net.start_decode(name)
        self.num_transfers = 0
        self.waiting_legs: list[tuple[Prefill, Leg, str]] = []
        self.waiting_loads: list[tuple[Decode, LoadJob, int]] = []
        self.legs: list[tuple[Prefill, Leg]] = []
        self.loads: list[tuple[Decode, str]] = []

    # requests

    @precondition(lambda self: self.num_transfers < MAX_TRANSFERS)
    @rule(
        p=st.sampled_from(ADDRESSES),
        d=st.sampled_from(NAMES),
        num_blocks=st.integers(1, 10),
        cached=st.integers(0, 9),
        prompts_differ=st.sampled_from([False] * 7 + [True]),
        on_failure=st.sampled_from(["recompute", "fail"]),
    )
    def arrive(
        self,
        p: str,
        d: str,
        num_blocks: int,
        cached: int,
        prompts_differ: bool,
        on_failure: Literal["recompute", "fail"],
    ) -> None:
        """A router sends both legs; each is taken up later, or never."""
        self.num_transfers += 1
        number = self.num_transfers
        transfer_id = bytes([number]) * 16
        prefill, decode = self.net.prefills[p], self.net.decodes[d]
        first = min(cached, num_blocks - 1)
        leg = Leg(transfer_id, 1000 + number if prompts_differ else number, num_blocks)
        self.waiting_legs.append((prefill, leg, decode.incarnation))
        job = LoadJob(
            f"r{number}",
            transfer_id,
            p,
            prefill.incarnation,
            first,
            [],
            block_hash(number, num_blocks - 1),
            num_blocks * 16,
            on_failure,
        )
        self.waiting_loads.append((decode, job, num_blocks - first))

    @precondition(lambda self: self.num_transfers < MAX_TRANSFERS)
    @rule(
        p=st.sampled_from(ADDRESSES),
        d=st.sampled_from(NAMES),
        num_blocks=st.integers(1, 10),
        cached=st.sampled_from([0, 0, 1, 5]),
        computed=st.integers(0, 10),
        load_first=st.booleans(),
        rounds=st.integers(0, 20),
        prompts_differ=rarely,
    )
    def arrive_and_begin(
        self,
        p: str,
        d: str,
        num_blocks: int,
        cached: int,
        computed: int,
        load_first: bool,
        rounds: int,
        prompts_differ: bool,
    ) -> None:
        """Both legs at once, some of the prompt computed, and a moment in which the network is well."""
        self.arrive(p, d, num_blocks, cached, prompts_differ, "fail")
        if load_first:
            self.take_up_load(len(self.waiting_loads) - 1, False)
        self.take_up_leg(len(self.waiting_legs) - 1)
        if not load_first:
            self.take_up_load(len(self.waiting_loads) - 1, False)
        if computed:
            self.compute(len(self.legs) - 1, computed)
        computed = min(computed, num_blocks)
        if computed == num_blocks:
            self.end_leg(len(self.legs) - 1, True)
        self.flow(rounds)

    @rule(rounds=st.integers(1, 8))
    def flow(self, rounds: int) -> None:
        """Everything moves a little, as it should."""
        for _ in range(rounds):
            self.net.one_round()

    @rule(rounds=st.integers(1, 8), seconds=st.sampled_from([0.1, 0.5]))
    def flow_and_tick(self, rounds: int, seconds: float) -> None:
        self.flow(rounds)
        self.net.tick(seconds)

    @precondition(lambda self: self.waiting_legs)
    @rule(n=pick)
    def take_up_leg(self, n: int) -> None:
        prefill, leg, peer = self.waiting_legs.pop(n % len(self.waiting_legs))
        if prefill.alive:
            prefill.begin(leg, peer)
            self.legs.append((prefill, leg))

    @precondition(lambda self: self.waiting_loads)
    @rule(n=pick, full_hit=st.sampled_from([False] * 5 + [True]))
    def take_up_load(self, n: int, full_hit: bool) -> None:
        decode, job, count = self.waiting_loads.pop(n % len(self.waiting_loads))
        if not decode.alive:
            return
        if full_hit:
            decode.do(decode.target.not_needed(job.transfer_id, job.peer, job.peer_incarnation, self.net.now))
            return
        blocks = decode.pool.take(count)
        prompt = job.transfer_id[0]
        ready = LoadJob(
            job.request_id,
            job.transfer_id,
            job.peer,
            job.peer_incarnation,
            job.first_block,
            blocks,
            job.last_hash,
            job.num_tokens,
            job.on_failure,
        )
        self.loads.append((decode, job.request_id))
        decode.load(ready, prompt)

    @precondition(lambda self: self.legs)
    @rule(n=pick, count=st.integers(1, 5))
    def compute(self, n: int, count: int) -> None:
        prefill, leg = self.legs[n % len(self.legs)]
        count = min(count, leg.num_blocks - leg.computed)
        if prefill.alive and not leg.over and count:
            prefill.save(leg, leg.computed, count)

    @precondition(lambda self: self.legs)
    @rule(n=pick, again=st.integers(1, 6))
    def preempt(self, n: int, again: int) -> None:
        """It was preempted, and tells again what it has, maybe with a few blocks more."""
        prefill, leg = self.legs[n % len(self.legs)]
        if prefill.alive and not leg.over and leg.computed:
            prefill.save(leg, 0, min(leg.computed + again // 4, leg.num_blocks, again))

    @precondition(lambda self: self.legs)
    @rule(n=pick, completed=st.sampled_from([True, True, True, False]))
    def end_leg(self, n: int, completed: bool) -> None:
        prefill, leg = self.legs[n % len(self.legs)]
        if prefill.alive and not leg.over:
            if completed and leg.computed < leg.num_blocks:
                prefill.save(leg, leg.computed, leg.num_blocks - leg.computed)
            prefill.end(leg, completed)

    @precondition(lambda self: self.loads)
    @rule(n=pick)
    def client_leaves(self, n: int) -> None:
        decode, request_id = self.loads[n % len(self.loads)]
        if decode.alive:
            decode.do(decode.target.cancel(request_id, self.net.now))

    @rule(p=st.sampled_from(ADDRESSES), count=st.integers(1, 8))
    def pool_is_short(self, p: str, count: int) -> None:
        prefill = self.net.prefills[p]
        prefill.do(prefill.source.relieve(count))

    @rule(p=st.sampled_from(ADDRESSES), good=st.booleans())
    def end_copy(self, p: str, good: bool) -> None:
        self.net.prefills[p].end_copy(good)

    # control messages

    def letter(self, n: int, *, keep: bool = False) -> Letter:
        at = n % len(self.net.letters)
        return self.net.letters[at] if keep else self.net.letters.pop(at)

    @precondition(lambda self: self.net.letters)
    @rule()
    def deliver_all(self) -> None:
        letters, self.net.letters = self.net.letters, []
        for one in letters:
            self.net.deliver(one)

    @precondition(lambda self: self.net.letters)
    @rule(n=pick, twice=st.booleans())
    def deliver_any(self, n: int, twice: bool) -> None:
        self.net.deliver(self.letter(n, keep=twice))

    @precondition(lambda self: self.net.letters)
    @rule(n=pick)
    def lose(self, n: int) -> None:
        self.letter(n)

    @precondition(lambda self: self.net.letters)
    @rule(n=pick, seed=pick, cut=st.booleans())
    def damage(self, n: int, seed: int, cut: bool) -> None:
        one = self.letter(n)
        data = one.data[: seed % len(one.data)] if cut else spoil(one.data, seed)
        self.net.deliver(Letter(one.to_prefill, one.address, one.decode, one.key, data))

    @rule(p=st.sampled_from(ADDRESSES), d=st.sampled_from(NAMES), seconds=st.sampled_from([0.5, 4.0, 8.0]))
    def partition(self, p: str, d: str, seconds: float) -> None:
        self.net.cut.add((p, d))
        for _ in range(round(seconds * 2)):
            self.net.one_round()
            self.net.tick(0.5)
        self.net.cut.clear()

    @rule(d=st.sampled_from(NAMES))
    def lose_control_connection(self, d: str) -> None:
        self.net.decodes[d].key += 1

    # frames

    @rule(p=st.sampled_from(ADDRESSES))
    def send_frame(self, p: str) -> None:
        self.net.send_frame(self.net.prefills[p])

    @rule(p=st.sampled_from(ADDRESSES), d=st.sampled_from(NAMES), count=st.integers(1, 4))
    def take_frame(self, p: str, d: str, count: int) -> None:
        for _ in range(count):
            self.net.take_frame((self.net.prefills[p].incarnation, self.net.decodes[d].incarnation))

    @rule()
    def pass_events(self) -> None:
        for prefill in self.net.prefills.values():
            prefill.pass_event()
        for decode in self.net.decodes.values():
            decode.pass_event()

    @rule(
        n=pick,
        fault=st.sampled_from(["lose", "double", "swap", "damage", "forge", "cut", "break"]),
        seed=pick,
        send=st.booleans(),
    )
    def harm_frames(self, n: int, fault: str, seed: int, send: bool) -> None:
        for prefill in self.net.prefills.values() if send else ():
            self.net.send_frame(prefill)
        pairs = [pair for pair, wire in self.net.links.items() if wire or fault == "break"]
        if not pairs:
            return
        pair = pairs[n % len(pairs)]
        wire = self.net.links[pair]
        at = seed % len(wire) if wire else 0
        if fault == "lose":
            del wire[at]
        elif fault == "double":
            wire.append(wire[at])
        elif fault == "swap":
            wire.rotate(1)
        elif fault == "damage":
            wire[at] = spoil(wire[at], seed)
        elif fault == "forge":
            with suppress(BlobError):  # it may be spoiled already
                wire[at] = forge(wire[at], SHAPE.compatibility)
        elif fault == "cut":
            wire[at] = wire[at][: seed % len(wire[at])]
        else:
            self.net.break_link(*pair, "reset")

    # time and lives

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.6, 0.6, 2.0, 2.0, 7.0, 31.0]))
    def tick(self, seconds: float) -> None:
        self.net.tick(seconds)

    @rule(p=st.sampled_from(ADDRESSES), really=rarely)
    def prefill_crashes(self, p: str, really: bool) -> None:
        if really:
            self.net.crash_prefill(p)

    @rule(d=st.sampled_from(NAMES), really=rarely)
    def decode_crashes(self, d: str, really: bool) -> None:
        if really:
            self.net.crash_decode(d)

    @rule(seconds=st.sampled_from([1.0, 3.0]))
    def all_is_well_for_a_while(self, seconds: float) -> None:
        self.net.cut.clear()
        self.net.run(seconds, 0.5)

    # what holds at any time

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "net"):
            return
        for prefill in self.net.prefills.values():
            assert prefill.source.num_spilled_blocks <= OVERFLOW_BLOCKS
            assert len(prefill.queue) <= self.config.frames_ahead * MAX_TRANSFERS
            assert prefill.source.num_sessions <= self.config.max_sessions
            held = sum(len(blocks) for blocks in prefill.pins.values())
            assert held + len(prefill.pool.free) == len(prefill.pool.blocks)
        for decode in self.net.decodes.values():
            assert decode.target.outstanding_credit <= BUFFER_BLOCKS * BLOCK_BYTES
            assert set(decode.landed_in) <= {job.transfer_id for job, _ in decode.jobs.values()}

    def teardown(self) -> None:
        if not hasattr(self, "net"):
            return
        self.net.cut.clear()
        for prefill, leg in self.legs:
            if prefill.alive and not leg.over:
                prefill.end(leg, False)
        self.net.run(20.0, 0.5)
        self.net.run(70.0, 5.0)
        for decode, request_id in self.loads:
            assert not decode.alive or request_id in decode.ended, "a request never ended"
        for prefill, leg in self.legs:
            assert not prefill.alive or leg.transfer_id in prefill.settled, "a leg never settled"
        for prefill in self.net.prefills.values():
            assert prefill.source.num_transfers == 0
            assert not prefill.pins
            assert not prefill.spills
            assert prefill.source.num_spilled_blocks == 0
        for decode in self.net.decodes.values():
            assert decode.target.num_loads == 0
            assert decode.target.outstanding_credit == 0
            assert not decode.landed_in
            assert len(decode.pool.free) == len(decode.pool.blocks)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = hypothesis_settings(max_examples=examples(60), stateful_step_count=60)
