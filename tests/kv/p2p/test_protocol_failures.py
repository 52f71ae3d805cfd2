"""Each failure of docs/disaggregation.md by itself: who notices it, how soon, and that both ends are free after it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from pagefleet_kv.p2p.transfer.actions import LoadEnded, Send
from pagefleet_kv.p2p.transfer.incoming import LoadJob
from pagefleet_kv.p2p.transfer.settings import P2PSettings
from pagefleet_protocol.kv_control import (
    Abort,
    Ack,
    Body,
    Cancel,
    Commit,
    ControlMessage,
    Credit,
    Nack,
    Pong,
    Renew,
    Reserve,
    Want,
    Welcome,
    decode,
    encode,
)

from tests.fakes.kv_p2p import BLOCK_BYTES, SHAPE, Decode, Leg, Net, Prefill, block_hash, forge, spoil

ID = bytes(range(16))


def world(*, recompute_budget: int = 1000, max_early_reserves: int = 1024) -> tuple[Net, Prefill, Decode]:
    config = P2PSettings(
        block_bytes=BLOCK_BYTES,
        buffer_bytes=32 * BLOCK_BYTES,
        overflow_bytes=4 * BLOCK_BYTES,
        frame_bytes=2 * BLOCK_BYTES,
        recompute_budget=recompute_budget,
        max_early_reserves=max_early_reserves,
    )
    net = Net(config)
    return net, net.start_prefill("p:1"), net.start_decode("d")


def load(prefill: Prefill, decode: Decode, transfer_id: bytes = ID, num_blocks: int = 8, *, fail: bool = True) -> str:
    request_id = f"r{transfer_id.hex()}"
    job = LoadJob(
        request_id,
        transfer_id,
        prefill.address,
        prefill.incarnation,
        0,
        decode.pool.take(num_blocks),
        block_hash(7, num_blocks - 1),
        num_blocks * 16,
        "fail" if fail else "recompute",
    )
    decode.load(job, 7)
    return request_id


def half_way(net: Net, prefill: Prefill, decode: Decode) -> tuple[str, Leg]:
    """A transfer of 8 blocks of which 4 have come."""
    request = load(prefill, decode)
    leg = Leg(ID, 7, 8)
    prefill.begin(leg, decode.incarnation)
    prefill.save(leg, 0, 4)
    net.run(0.5)
    assert decode.target.counters.received_blocks == 4
    return request, leg


def finish(prefill: Prefill, leg: Leg) -> None:
    prefill.save(leg, leg.computed, leg.num_blocks - leg.computed)
    prefill.end(leg, True)


def failure(decode: Decode, request: str) -> str:
    ended = decode.ended[request]
    assert ended.num_blocks == 0
    assert ended.failure is not None
    return ended.failure


def fault(decode: Decode, request: str) -> str | None:
    return decode.ended[request].fault


def assert_free(net: Net) -> None:
    for prefill in net.prefills.values():
        assert prefill.source.num_transfers == 0
        assert not prefill.pins
        assert not prefill.spills
    for decode_engine in net.decodes.values():
        assert decode_engine.target.num_loads == 0
        assert decode_engine.target.outstanding_credit == 0
        assert len(decode_engine.pool.free) == 256


def under_way(net: Net, kind: type[Body]) -> list[int]:
    return [
        i for i, letter in enumerate(net.letters) if isinstance(decode(letter.data, SHAPE.compatibility).body, kind)
    ]


def run_losing(net: Net, kind: type[Body], seconds: float, times: int = 1_000_000) -> int:
    """Let time pass while so many messages of one kind are lost; returns how many were."""
    lost = 0
    until = net.now + seconds
    while net.now < until:
        net.tick(0.25)
        for _ in range(40):
            for at in reversed(under_way(net, kind)):
                if lost < times:
                    del net.letters[at]
                    lost += 1
            net.one_round()
    return lost


def test_a_prefill_engine_that_crashes_is_noticed_by_its_connection() -> None:
    net, prefill, decode_engine = world()
    request, _ = half_way(net, prefill, decode_engine)
    net.crash_prefill("p:1")
    net.run_quiet()
    assert "data connection" in failure(decode_engine, request)
    assert fault(decode_engine, request) == "unreachable"
    assert_free(net)


def test_a_prefill_engine_that_falls_silent_is_dead_after_five_seconds() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    net.cut.add(("p:1", "d"))
    cut_at = net.now
    net.run(4.0)
    assert decode_engine.target.peers()["suspect"] == 1
    assert request not in decode_engine.ended
    while request not in decode_engine.ended:
        net.run(0.25)
    assert net.now <= cut_at + 5.25
    assert "silent" in failure(decode_engine, request)
    assert decode_engine.target.peers()["dead"] == 1
    again = load(prefill, decode_engine, bytes(15) + b"1")
    assert "silent" in failure(decode_engine, again)  # not tried again yet
    assert fault(decode_engine, request) == fault(decode_engine, again) == "unreachable"
    net.run(0.5)
    assert prefill.source.num_transfers == 0  # it noticed too
    assert not prefill.pins
    net.cut.clear()
    prefill.end(leg, False)
    net.run(1.0)
    later = load(prefill, decode_engine, bytes(15) + b"2")
    new = Leg(bytes(15) + b"2", 7, 8)
    prefill.begin(new, decode_engine.incarnation)
    finish(prefill, new)
    net.run(1.0)
    assert decode_engine.ended[later].num_blocks == 8
    assert_free(net)


@pytest.mark.parametrize("eighths", range(1, 9))
def test_both_sides_of_a_cut_notice_it_equally_soon_and_neither_is_nervous(eighths: int) -> None:
    """Whenever after their last ping it comes: five seconds after a word that was said at most one second before."""
    net, prefill, decode_engine = world()
    request, _ = half_way(net, prefill, decode_engine)
    tick = 0.125
    net.run(2.0, tick)
    net.run(eighths * tick, tick)
    dead, ping = net.settings.timing.dead, net.settings.timing.ping
    net.cut.add(("p:1", "d"))
    cut_at = net.now
    net.run(dead - ping - tick, tick)
    assert request not in decode_engine.ended
    assert ID not in prefill.settled
    noticed: dict[str, float] = {}
    while len(noticed) < 2:
        net.run(tick, tick)
        assert net.now <= cut_at + dead + tick, noticed
        if request in decode_engine.ended:
            noticed.setdefault("decode", net.now)
        if ID in prefill.settled:
            noticed.setdefault("prefill", net.now)
    assert abs(noticed["prefill"] - noticed["decode"]) <= tick
    assert_free(net)


def test_a_peer_that_is_frozen_for_less_than_five_seconds_is_not_dead_on_either_side() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    tick = 0.125
    net.run(1.0, tick)
    net.cut.add(("p:1", "d"))
    net.run(net.settings.timing.dead - net.settings.timing.ping - tick, tick)
    net.cut.clear()
    finish(prefill, leg)
    net.run(3.0, tick)
    assert decode_engine.ended[request].num_blocks == 8
    assert prefill.settled[ID].delivered
    assert_free(net)


def test_a_short_cut_of_the_control_link_costs_nothing() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    net.cut.add(("p:1", "d"))
    net.run(3.0)
    net.cut.clear()
    decode_engine.key += 1  # the socket is another one for P
    finish(prefill, leg)
    net.run(3.0)
    assert decode_engine.ended[request].num_blocks == 8
    assert_free(net)


def test_a_decode_engine_that_crashes_holds_nothing_for_more_than_five_seconds() -> None:
    net, prefill, decode_engine = world()
    half_way(net, prefill, decode_engine)
    net.crash_decode("d")
    net.run(5.25)
    assert prefill.source.num_transfers == 0
    assert not prefill.settled[ID].delivered
    assert_free(net)


def test_a_lease_that_nobody_renews_ends_the_transfer_on_both_sides() -> None:
    net, prefill, decode_engine = world()
    request, _ = half_way(net, prefill, decode_engine)
    lost = run_losing(net, Renew, 31)
    assert lost > 3
    assert "expired" in failure(decode_engine, request)
    assert prefill.source.counters.lease_expiries == 1
    assert_free(net)


def test_a_leg_that_nobody_reserves_is_kept_for_one_lease() -> None:
    net, prefill, decode_engine = world()
    leg = Leg(ID, 7, 8)
    prefill.begin(leg, decode_engine.incarnation)
    finish(prefill, leg)
    net.run(29.5)
    assert ID not in prefill.settled
    net.run(0.75)
    assert prefill.settled[ID].reason == "expired"
    request = load(prefill, decode_engine)
    net.run(1.0)
    assert "expired" in failure(decode_engine, request)
    assert_free(net)


def test_a_leg_that_never_comes_is_not_waited_for_however_often_the_lease_is_renewed() -> None:
    net, prefill, decode_engine = world()
    request = load(prefill, decode_engine)
    net.run(9.5)
    assert request not in decode_engine.ended
    net.run(0.75)
    assert "prefill request did not come" in failure(decode_engine, request)
    assert_free(net)
    prefill.begin(Leg(ID, 7, 8), decode_engine.incarnation)
    assert not prefill.settled[ID].delivered, "too late"


def test_a_leg_that_comes_late_has_a_whole_lease() -> None:
    net, prefill, decode_engine = world()
    request = load(prefill, decode_engine)
    net.run(9.5)
    leg = Leg(ID, 7, 8)
    prefill.begin(leg, decode_engine.incarnation)
    net.run(20.0)
    prefill.save(leg, 0, 8)
    finish(prefill, leg)
    net.run(1.0)
    assert decode_engine.ended[request].num_blocks == 8
    assert_free(net)


def test_a_renewed_lease_outlives_its_first_duration() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    net.run(45.0)
    finish(prefill, leg)
    net.run(1.0)
    assert decode_engine.ended[request].num_blocks == 8
    assert_free(net)


def test_a_client_that_leaves_frees_both_at_once() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    decode_engine.do(decode_engine.target.cancel(request, net.now))
    net.run_quiet()
    assert decode_engine.ended[request] == LoadEnded(request, 0, None)
    assert_free(net)
    pins = len(prefill.pins)
    prefill.save(leg, 4, 4)  # it goes on computing, and nothing of it is kept
    assert len(prefill.pins) == pins == 0


def test_a_leg_that_ends_early_frees_both_at_once() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    prefill.end(leg, False)
    net.run_quiet()
    assert "ended early" in failure(decode_engine, request)
    assert_free(net)


def test_blocks_stay_reserved_while_a_frame_is_being_written() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    prefill.save(leg, 4, 4)
    for _ in range(3):
        net.send_frame(prefill)
    pair = (prefill.incarnation, decode_engine.incarnation)
    net.take_frame(pair)
    assert decode_engine.writing
    decode_engine.do(decode_engine.target.cancel(request, net.now))
    for _ in range(3):
        decode_engine.pass_event()
    assert request not in decode_engine.ended
    net.take_frame(pair)
    decode_engine.pass_event()
    assert request in decode_engine.ended
    net.run_quiet()
    assert_free(net)


def test_blocks_stay_pinned_while_a_frame_is_being_read() -> None:
    net, prefill, decode_engine = world()
    _, leg = half_way(net, prefill, decode_engine)
    prefill.save(leg, 4, 2)
    net.send_frame(prefill)
    assert prefill.reading is not None
    prefill.end(leg, False)
    prefill.pass_event()
    assert len(prefill.pins) == 1
    net.run_quiet()
    assert_free(net)


@pytest.mark.parametrize("kind", [Welcome, Reserve, Ack, Credit, Want, Commit, Pong])
def test_any_message_may_be_lost_once_or_twice(kind: type[Body]) -> None:
    net, prefill, decode_engine = world()
    request = load(prefill, decode_engine, num_blocks=40)
    leg = Leg(ID, 7, 40)
    prefill.begin(leg, decode_engine.incarnation)
    finish(prefill, leg)
    lost = run_losing(net, kind, 8, times=2)
    assert lost >= 1
    assert decode_engine.ended[request].num_blocks == 40
    assert prefill.settled[ID].delivered
    net.run(1.0)
    assert_free(net)


def harm_last(change: Callable[[bytes], bytes] | None) -> Callable[[Net], None]:
    def harm(net: Net) -> None:
        (wire,) = net.links.values()
        last = wire.pop()
        if change is not None:
            wire.append(change(last))

    return harm


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (harm_last(None), "did not come"),
        (harm_last(lambda frame: spoil(frame[:-1], 1)[:-1] + frame[-2:]), ""),
        (harm_last(lambda frame: frame[:-1] + bytes([frame[-1] ^ 1])), "damaged"),
        (harm_last(lambda frame: frame[:-3]), "connection was lost"),
        (harm_last(lambda frame: forge(frame, SHAPE.compatibility)), "were committed"),
    ],
    ids=["lost", "header", "payload", "cut", "forged"],
)
def test_no_harmed_frame_is_ever_used(harm: Callable[[Net], None], reason: str) -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    finish(prefill, leg)
    for _ in range(6):
        net.send_frame(prefill)
        prefill.pass_event()
    harm(net)
    net.run(6.0)
    assert reason in failure(decode_engine, request)
    assert reason in prefill.settled[ID].reason, "both logs say why"
    assert_free(net)


def test_a_frame_that_comes_twice_changes_nothing() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    prefill.save(leg, 4, 2)
    net.send_frame(prefill)
    net.send_frame(prefill)
    (wire,) = net.links.values()
    wire.append(wire[0])
    net.run_quiet()
    prefill.save(leg, 6, 2)
    prefill.end(leg, True)
    net.run(1.0)
    assert decode_engine.ended[request].num_blocks == 8
    assert decode_engine.target.counters.refused_frames == 1
    assert_free(net)


def test_engines_that_mean_different_prompts_find_out() -> None:
    net, prefill, decode_engine = world()
    request = load(prefill, decode_engine)
    leg = Leg(ID, 8, 8)
    prefill.begin(leg, decode_engine.incarnation)
    finish(prefill, leg)
    net.run(1.0)
    assert "different prompts" in failure(decode_engine, request)
    assert_free(net)


def test_a_prompt_shorter_than_what_is_wanted_ends_it() -> None:
    net, prefill, decode_engine = world()
    request = load(prefill, decode_engine, num_blocks=9)
    leg = Leg(ID, 7, 8)
    prefill.begin(leg, decode_engine.incarnation)
    finish(prefill, leg)
    net.run(1.0)
    assert "8 whole blocks here, 9 are wanted" in failure(decode_engine, request)
    assert_free(net)


def test_a_restarted_prefill_engine_is_greeted_anew() -> None:
    net, prefill, decode_engine = world()
    half_way(net, prefill, decode_engine)
    new = net.crash_prefill("p:1")
    net.run(2.5)
    stale = load(prefill, decode_engine, bytes(15) + b"1")
    fresh = load(new, decode_engine, bytes(15) + b"2")
    leg = Leg(bytes(15) + b"2", 7, 8)
    new.begin(leg, decode_engine.incarnation)
    finish(new, leg)
    net.run(2.0)
    assert "another engine" in failure(decode_engine, stale)
    assert fault(decode_engine, stale) == "not_asked"
    assert decode_engine.ended[fresh].num_blocks == 8
    assert_free(net)


def test_an_engine_of_another_shape_is_refused_with_what_differs() -> None:
    net = Net(P2PSettings(block_bytes=BLOCK_BYTES))
    prefill = net.start_prefill("p:1", msgspec.structs.replace(SHAPE, block_size=32))
    decode_engine = net.start_decode("d")
    request = load(prefill, decode_engine)
    net.run(1.0)
    assert "block_size 16 here, 32 there" in failure(decode_engine, request)
    again = load(prefill, decode_engine, bytes(15) + b"1")
    net.run(1.0)
    assert fault(decode_engine, request) == fault(decode_engine, again) == "incompatible"
    assert decode_engine.target.peers()["refused"] == 1
    assert prefill.source.num_sessions == 0


def test_a_plane_that_only_one_has_is_refused() -> None:
    net, prefill, decode_engine = world()
    prefill.source._invite = {}
    request = load(prefill, decode_engine)
    net.run(1.0)
    assert "no data plane in common" in failure(decode_engine, request)
    assert fault(decode_engine, request) == "incompatible"


def test_a_draining_engine_takes_no_transfer_that_it_does_not_know() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    prefill.do(prefill.source.drain())
    other = load(prefill, decode_engine, bytes(15) + b"1")
    net.run(1.5)
    assert "draining" in failure(decode_engine, other)
    assert fault(decode_engine, other) == "transfer_failed"
    assert decode_engine.target.peers()["draining"] == 1
    finish(prefill, leg)
    net.run(1.0)
    assert decode_engine.ended[request].num_blocks == 8
    assert_free(net)


def test_an_engine_that_begins_to_drain_sends_away_who_waits_for_a_leg() -> None:
    net, prefill, decode_engine = world()
    request = load(prefill, decode_engine)
    net.run(0.5)
    prefill.do(prefill.source.drain())
    net.run(0.1)
    assert "draining" in failure(decode_engine, request)
    assert_free(net)


def test_reserves_for_unknown_transfers_are_bounded_and_asked_again() -> None:
    net, prefill, decode_engine = world(max_early_reserves=2)
    ids = [bytes([n]) * 16 for n in range(1, 5)]
    requests = [load(prefill, decode_engine, transfer_id) for transfer_id in ids]
    net.run(2.0)
    assert prefill.source.num_transfers == 2
    for transfer_id in ids:
        leg = Leg(transfer_id, 7, 8)
        prefill.begin(leg, decode_engine.incarnation)
        finish(prefill, leg)
    net.run(5.0)
    assert all(decode_engine.ended[request].num_blocks == 8 for request in requests)
    assert_free(net)


def test_failed_transfers_are_computed_as_far_as_the_budget_goes() -> None:
    net, prefill, decode_engine = world(recompute_budget=150)
    ids = [bytes([n]) * 16 for n in (1, 2)]
    first, second = (load(prefill, decode_engine, transfer_id, fail=False) for transfer_id in ids)
    net.run(11.0)
    assert decode_engine.ended[first].failure is None
    assert "prefill request did not come" in decode_engine.ended[first].cause
    assert "budget" in failure(decode_engine, second)
    assert decode_engine.target.counters.recomputed_tokens == 128


def test_a_transfer_is_tried_once() -> None:
    net, prefill, decode_engine = world()
    half_way(net, prefill, decode_engine)
    prefill_twice = LoadJob("other", ID, "p:1", prefill.incarnation, 0, [], block_hash(7, 7), 128, "fail")
    decode_engine.load(prefill_twice, 7)
    assert "tried before" in failure(decode_engine, "other")


def test_another_decode_engine_cannot_take_or_end_a_transfer() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    thief = net.start_decode("thief")
    stolen = load(prefill, thief)
    thief.do(thief.target.not_needed(ID, "p:1", prefill.incarnation, net.now))
    net.run(1.0)
    assert "unknown" in failure(thief, stolen)
    finish(prefill, leg)
    net.run(1.0)
    assert decode_engine.ended[request].num_blocks == 8


def test_a_reserve_of_the_wrong_engine_gives_way_to_the_right_one() -> None:
    net, prefill, decode_engine = world()
    thief = net.start_decode("thief")
    stolen = load(prefill, thief)
    net.run(0.5)
    request = load(prefill, decode_engine)
    leg = Leg(ID, 7, 8)
    prefill.begin(leg, decode_engine.incarnation)
    finish(prefill, leg)
    net.run(3.0)
    assert "unknown" in failure(thief, stolen)
    assert decode_engine.ended[request].num_blocks == 8


def test_messages_without_a_session_are_answered_and_change_nothing() -> None:
    _, prefill, _ = world()
    for body in (Renew(), Cancel("gone"), Reserve(0, 4, 99, bytes(32))):
        actions = prefill.source.message("stranger", ControlMessage(body, ID, 1, 5), 100.0)
        (sent,) = actions
        assert isinstance(sent, Send)
        assert sent.message == ControlMessage(Nack("no_session"), ID, 1, 5)
    assert prefill.source.num_transfers == 0


def test_closing_ends_everything_and_tells_the_peers() -> None:
    net, prefill, decode_engine = world()
    request, _ = half_way(net, prefill, decode_engine)
    prefill.do(prefill.source.close())
    net.run_quiet()
    assert "stops" in failure(decode_engine, request)
    other = load(prefill, decode_engine, bytes(15) + b"1")
    decode_engine.do(decode_engine.target.close(net.now))
    net.run_quiet()
    assert "stops" in failure(decode_engine, other)
    assert (fault(decode_engine, request), fault(decode_engine, other)) == ("transfer_failed", "not_asked")
    assert_free(net)


def test_idle_links_are_closed() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    finish(prefill, leg)
    net.run(62.0, 0.5)
    assert decode_engine.ended[request].num_blocks == 8
    assert sum(decode_engine.target.peers().values()) == 0
    assert not net.links
    net.run(7.0)
    assert prefill.source.num_sessions == 0


def test_an_abort_for_another_epoch_is_ignored() -> None:
    net, prefill, decode_engine = world()
    request, leg = half_way(net, prefill, decode_engine)
    old = ControlMessage(Abort("late"), ID, 77)
    assert decode_engine.target.message("p:1", old, net.now) == []
    assert encode(old, SHAPE.compatibility)
    finish(prefill, leg)
    net.run(1.0)
    assert decode_engine.ended[request].num_blocks == 8
