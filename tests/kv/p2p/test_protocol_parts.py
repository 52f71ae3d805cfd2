"""What the two ends are made of: credit, ledgers, leases, the budget, sessions, held blocks, links."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_kv.p2p.transfer.actions import (
    Connect,
    Dial,
    DropSpill,
    HangUp,
    OnPlane,
    Piece,
    Send,
    Unpin,
)
from pagefleet_kv.p2p.transfer.credit import CreditPool, RecomputeBudget
from pagefleet_kv.p2p.transfer.ledger import FrameLedger
from pagefleet_kv.p2p.transfer.links import Link, LinkState
from pagefleet_kv.p2p.transfer.outgoing import Holdings
from pagefleet_kv.p2p.transfer.sessions import Lease, Sessions, Tombstones
from pagefleet_kv.p2p.transfer.settings import P2PSettings, PeerTiming
from pagefleet_protocol.kv_control import Cancel, ControlMessage, Hello, Ping, Welcome

from tests.fakes.kv_p2p import block_hash

A, B = b"a" * 16, b"b" * 16


# credit


def test_each_transfer_gets_some_ahead_and_half_is_kept_for_what_is_ready() -> None:
    pool = CreditPool(1600, 10)
    for n in range(10):
        pool.open(bytes([n]) * 16, 10_000)
    pool.share()
    granted = [pool.granted(bytes([n]) * 16) for n in range(10)]
    assert granted == [200] * 4 + [0] * 6
    pool.ready(bytes([9]) * 16, 5000)
    pool.share()
    assert pool.granted(bytes([9]) * 16) == 200


def test_credit_comes_back_when_bytes_arrive_and_when_a_transfer_ends() -> None:
    pool = CreditPool(100, 10)
    pool.open(A, 1000)
    pool.ready(A, 1000)
    for _ in range(20):
        pool.share()
    assert pool.outstanding == pool.granted(A) == 100
    assert pool.share() == []
    assert pool.arrived(A, 30)
    assert pool.share() == [A]
    pool.open(B, 1000)
    pool.ready(B, 10)
    pool.close(A)
    assert pool.share() == [B]
    assert pool.outstanding == pool.granted(B)


def test_more_than_was_granted_is_noticed() -> None:
    pool = CreditPool(100, 10)
    pool.open(A, 50)
    pool.share()
    assert not pool.arrived(A, 60)


def test_a_pool_smaller_than_a_block_lets_one_block_through_at_a_time() -> None:
    pool = CreditPool(1, 10)
    pool.open(A, 20)
    pool.open(B, 20)
    assert pool.share() == [A]
    assert pool.granted(A) == 10
    assert pool.arrived(A, 10)
    pool.ready(B, 20)
    pool.share()
    assert pool.outstanding == 10


@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.sampled_from(["open", "close", "ready", "arrive"]), st.integers(0, 5), st.integers(1, 30))),
)
def test_credit_never_exceeds_the_pool_and_all_that_is_ready_gets_through(
    capacity: int, steps: list[tuple[str, int, int]]
) -> None:
    pool = CreditPool(capacity * 4, 4)
    open_: dict[bytes, list[int]] = {}
    for step, number, count in steps:
        transfer_id = bytes([number]) * 16
        if step == "open" and transfer_id not in open_:
            pool.open(transfer_id, count * 4)
            open_[transfer_id] = [count * 4, 0]
        elif step == "close":
            pool.close(transfer_id)
            open_.pop(transfer_id, None)
        elif transfer_id in open_ and step == "ready":
            pool.ready(transfer_id, count)
        elif transfer_id in open_ and pool.granted(transfer_id) > open_[transfer_id][1]:
            open_[transfer_id][1] += 4
            assert pool.arrived(transfer_id, 4)
        pool.share()
        assert pool.outstanding <= capacity * 4
    for transfer_id, (total, _) in open_.items():
        pool.ready(transfer_id, total)
    for _ in range(500):
        pool.share()
        for transfer_id, account in open_.items():
            if pool.granted(transfer_id) > account[1]:
                account[1] += 4
                assert pool.arrived(transfer_id, 4)
    assert all(arrived == total for total, arrived in open_.values())


# ledgers


def test_two_ledgers_agree_only_on_the_same_frames() -> None:
    def ledger(*frames: tuple[int, int, int]) -> FrameLedger:
        made = FrameLedger(5)
        for frame in frames:
            made.record(*frame)
        return made

    frames = ((2, 20, 111), (1, 10, 222))
    commit = ledger(*frames).commit(3)
    assert ledger(*frames).differs(commit) == ""
    for other in ((frames[1], frames[0]), frames[:1], ((3, 30, 111),), ((2, 20, 111), (1, 10, 223))):
        assert ledger(*other).differs(commit)
    assert FrameLedger(6).commit(0) == FrameLedger(5).commit(0)


def test_a_ledger_knows_the_next_frame() -> None:
    ledger = FrameLedger(5)
    assert ledger.follows(0, 5)
    ledger.record(2, 20, 1)
    assert ledger.follows(1, 7)
    assert not ledger.follows(0, 5)
    assert not ledger.follows(1, 8)
    assert not ledger.follows(2, 7)


# leases, tombstones, the budget


def test_a_lease_runs_out_unless_it_is_renewed() -> None:
    lease = Lease(30, 100)
    lease.renew(110)
    lease.renew(105)
    assert not lease.expired(139.9)
    assert lease.expired(140)


def test_the_oldest_tombstones_are_forgotten() -> None:
    ended: Tombstones[int] = Tombstones(2)
    for n, transfer_id in enumerate((A, B, A, b"c" * 16)):
        ended.add(transfer_id, n)
    assert len(ended) == 2
    assert (ended.get(A), ended.get(B), ended.get(b"c" * 16)) == (2, None, 3)


def test_the_budget_is_one_minutes_tokens_and_fills_again() -> None:
    budget = RecomputeBudget(600)
    assert budget.take(400, 0)
    assert not budget.take(400, 0)
    assert not budget.take(400, 19)
    assert budget.take(400, 20)


def test_a_prompt_larger_than_the_budget_is_paid_off_after() -> None:
    budget = RecomputeBudget(600)
    assert budget.take(1800, 0)
    assert not budget.take(1, 119)
    assert budget.take(1, 121)
    assert not RecomputeBudget(0).take(1, 0)


# sessions


def test_a_session_keeps_its_incarnation_when_its_socket_changes() -> None:
    sessions = Sessions(2, PeerTiming())
    first = sessions.greet("k1", "d1", "tcp", 0)
    assert sessions.greet("k2", "d1", "tcp", 1) is first
    assert sessions.heard("k1", 2) is None
    assert sessions.heard("k2", 2) is first
    assert len(sessions) == 1


def test_sessions_are_bounded_and_the_silent_ones_go() -> None:
    sessions = Sessions(2, PeerTiming())
    assert sessions.greet("k1", "d1", "tcp", 0)
    assert sessions.greet("k2", "d2", "tcp", 3)
    assert sessions.greet("k3", "d3", "tcp", 3) is None
    assert [dead.incarnation for dead in sessions.take_dead(5)] == ["d1"]
    assert sessions.heard("k1", 6) is None
    assert sessions.greet("k3", "d3", "tcp", 6)


def test_a_restarted_engine_on_the_same_socket_is_another_session() -> None:
    sessions = Sessions(4, PeerTiming())
    old = sessions.greet("k", "d1", "tcp", 0)
    new = sessions.greet("k", "d2", "tcp", 1)
    assert sessions.heard("k", 2) is new
    assert old is not None
    assert old.peer == ""
    assert sessions.take_dead(6.5) == [old]
    assert sessions.heard("k", 7) is new


# held blocks


def holdings(*saves: tuple[int, int, list[int]]) -> Holdings:
    made = Holdings()
    for save, first, blocks in saves:
        made.add(save, first, blocks, [block_hash(1, first + n) for n in range(len(blocks))])
    return made


def test_a_save_is_unpinned_when_its_last_block_is_let_go() -> None:
    held = holdings((1, 0, [10, 11]), (2, 2, [12]))
    assert held.num_pinned == 3
    assert held.release(0, 1) == []
    assert held.release(0, 3) == [Unpin(1), Unpin(2)]
    assert held.num_pinned == 0


def test_blocks_told_again_are_let_go_at_once() -> None:
    held = holdings((1, 0, [10, 11]))
    assert held.add(2, 0, [20], [block_hash(1, 0)]) == [Unpin(2)]
    assert held.add(3, 1, [30, 31], [block_hash(1, 1), block_hash(1, 2)]) == []
    assert held.piece(0, 9) == Piece(0, 3, blocks=[10, 11, 31])
    assert held.hashes == [block_hash(1, n) for n in range(3)]
    assert held.release(2, 3) == [Unpin(3)]


def test_what_is_spilled_is_read_from_there_and_its_pin_ends() -> None:
    held = holdings((1, 0, [10, 11]), (2, 2, [12, 13]))
    assert held.spill(7, 0, 2) == [10, 11]
    assert held.moving
    assert held.piece(0, 4) is None  # on its way
    assert held.release(0, 1) == []
    assert held.spilled(7, done=True) == [Unpin(1)]
    assert held.piece(0, 4) == Piece(0, 2, spill=7, spill_offset=0)
    assert held.release(0, 1) == []
    assert held.piece(1, 4) == Piece(1, 1, spill=7, spill_offset=1)
    assert held.piece(2, 4) == Piece(2, 2, blocks=[12, 13])
    assert held.release(1, 4) == [DropSpill(7), Unpin(2)]


def test_a_save_is_spilled_whole_or_not_at_all() -> None:
    held = holdings((1, 0, [10, 11, 12]), (2, 3, [13]))
    assert held.spill(7, 0, 2) == [13]
    assert held.spill(8, 1, 9) == []  # its first block is on its way out
    assert held.spilled(7, done=False) == []
    assert held.piece(0, 4) == Piece(0, 4, blocks=[10, 11, 12, 13])


# links


def link() -> Link:
    made = Link("p:1", Hello("d" * 32, ("tcp",)), PeerTiming())
    dialled = made.dial(100.0)
    assert isinstance(dialled[0], Dial)
    return made


def welcome(made: Link, incarnation: str = "p" * 32, seq: int = 1) -> list[object]:
    body = Welcome(incarnation, "tcp", b"token", 30_000)
    return [*made.welcome(ControlMessage(body, seq=seq), body)]


def test_a_link_says_hello_until_it_is_welcomed_then_pings() -> None:
    made = link()
    assert made.tick(100.5) == []
    (again,) = made.tick(101.0)
    assert isinstance(again, Send)
    assert isinstance(again.message.body, Hello)
    assert welcome(made) == [Connect("tcp", "p" * 32, "p:1", b"token")]  # it answers the first, late
    made.heard(101.5)
    assert welcome(made, seq=2) == []
    (ping,) = made.tick(102.0)
    assert isinstance(ping, Send)
    assert isinstance(ping.message.body, Ping)


@pytest.mark.parametrize(("silent", "state"), [(2.9, LinkState.READY), (3.0, LinkState.SUSPECT), (5.0, LinkState.DEAD)])
def test_silence_makes_a_link_suspect_then_dead(silent: float, state: LinkState) -> None:
    made = link()
    welcome(made)
    made.data_changed(True)
    made.heard(100.0)
    actions = made.tick(100.0 + silent)
    assert made.state is state
    dead = [OnPlane("tcp", "disconnect", ("p" * 32, "target")), HangUp("p:1")]
    assert (actions == dead) == (state is LinkState.DEAD)


def test_a_dead_link_is_left_alone_for_longer_each_time() -> None:
    made = link()
    pauses = []
    now = 100.0
    for _ in range(8):
        made.give_up("gone", now)
        start = now
        while not made.may_dial(now):
            now += 0.5
        pauses.append(now - start)
        made.dial(now)
    assert pauses == [0.5, 1, 2, 4, 8, 15, 15, 15]


def test_notices_wait_for_the_right_incarnation() -> None:
    made = link()
    assert made.cancel(A, "p" * 32, 0, Cancel("not_needed")) == []
    assert made.cancel(B, "q" * 32, 0, Cancel("not_needed")) == []
    told = [action.message for action in welcome(made) if isinstance(action, Send)]
    assert told == [ControlMessage(Cancel("not_needed"), A)]


def test_another_incarnation_gets_another_data_connection() -> None:
    made = link()
    welcome(made)
    made.data_changed(True)
    made.greet(110.0)
    assert welcome(made, "r" * 32, seq=2) == [
        OnPlane("tcp", "disconnect", ("p" * 32, "target")),
        Connect("tcp", "r" * 32, "p:1", b"token"),
    ]


def test_a_frame_has_at_least_one_block() -> None:
    assert P2PSettings(block_bytes=10, frame_bytes=35).blocks_per_frame == 3
    assert P2PSettings(block_bytes=10, frame_bytes=5).blocks_per_frame == 1
