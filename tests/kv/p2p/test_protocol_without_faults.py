"""Whole transfers between the two state machines, on a network that does what it should."""

from __future__ import annotations

from typing import Literal

import pytest
from pagefleet_kv.p2p.transfer.actions import Send
from pagefleet_kv.p2p.transfer.incoming import LoadJob
from pagefleet_kv.p2p.transfer.settings import P2PSettings, SendType
from pagefleet_protocol.kv_control import ControlMessage, Hello, Ping, Pong

from tests.fakes.kv_p2p import BLOCK_BYTES, Decode, Leg, Net, Prefill, block_hash, content

ID = bytes(range(16))


def settings(send_type: SendType = "put_async", blocks: int = 64, frame_blocks: int = 3) -> P2PSettings:
    return P2PSettings(
        block_bytes=BLOCK_BYTES,
        send_type=send_type,
        buffer_bytes=blocks * BLOCK_BYTES,
        overflow_bytes=16 * BLOCK_BYTES,
        frame_bytes=frame_blocks * BLOCK_BYTES,
    )


def pair(config: P2PSettings) -> tuple[Net, Prefill, Decode]:
    net = Net(config)
    return net, net.start_prefill("p:1"), net.start_decode("d")


def load(
    prefill: Prefill,
    decode: Decode,
    num_blocks: int,
    *,
    transfer_id: bytes = ID,
    first: int = 0,
    prompt: int = 7,
    on_failure: Literal["recompute", "fail"] = "fail",
) -> str:
    request_id = f"r{transfer_id.hex()}"
    blocks = decode.pool.take(num_blocks - first)
    job = LoadJob(
        request_id,
        transfer_id,
        prefill.address,
        prefill.incarnation,
        first,
        blocks,
        block_hash(prompt, num_blocks - 1),
        (num_blocks - first) * 16,
        on_failure,
    )
    decode.load(job, prompt)
    return request_id


def compute(prefill: Prefill, decode: Decode, num_blocks: int, chunk: int = 4, transfer_id: bytes = ID) -> Leg:
    leg = Leg(transfer_id, 7, num_blocks)
    prefill.begin(leg, decode.incarnation)
    for first in range(0, num_blocks, chunk):
        prefill.save(leg, first, min(chunk, num_blocks - first))
        prefill.net.run_quiet()
    prefill.end(leg, True)
    return leg


def assert_nothing_is_left(net: Net) -> None:
    for prefill in net.prefills.values():
        assert prefill.source.num_transfers == 0
        assert not prefill.pins
        assert not prefill.spills
        assert prefill.source.num_pinned_blocks == prefill.source.num_spilled_blocks == 0
        assert len(prefill.pool.free) == 512
    for decode in net.decodes.values():
        assert decode.target.num_loads == 0
        assert decode.target.outstanding_credit == 0
        assert not decode.jobs
        assert len(decode.pool.free) == 256


@pytest.mark.parametrize("send_type", ["put_async", "put", "get"])
@pytest.mark.parametrize("d_first", [True, False])
@pytest.mark.parametrize(("num_blocks", "first"), [(1, 0), (11, 0), (11, 5), (64, 63)])
def test_all_blocks_come_whichever_half_is_first(
    send_type: SendType, d_first: bool, num_blocks: int, first: int
) -> None:
    net, prefill, decode = pair(settings(send_type))
    if d_first:
        request = load(prefill, decode, num_blocks, first=first)
        net.run_quiet()
        compute(prefill, decode, num_blocks)
    else:
        compute(prefill, decode, num_blocks)
        net.run_quiet()
        request = load(prefill, decode, num_blocks, first=first)
    net.run(2)
    assert decode.ended[request].num_blocks == num_blocks - first
    assert prefill.settled[ID].delivered
    assert prefill.source.counters.sent_blocks == decode.target.counters.received_blocks == num_blocks - first
    assert prefill.source.counters.nacks == decode.target.counters.nacks == 0
    assert_nothing_is_left(net)


def test_put_async_sends_while_the_leg_computes_and_the_others_do_not() -> None:
    sent = {}
    for send_type in ("put_async", "put", "get"):
        net, prefill, decode = pair(settings(send_type))
        load(prefill, decode, 12)
        net.run_quiet()
        leg = Leg(ID, 7, 12)
        prefill.begin(leg, decode.incarnation)
        prefill.save(leg, 0, 6)
        net.run(1)
        sent[send_type] = prefill.source.counters.sent_blocks
        assert not decode.ended
    assert sent == {"put_async": 6, "put": 0, "get": 0}


def test_a_leg_that_was_preempted_tells_its_blocks_again() -> None:
    net, prefill, decode = pair(settings())
    request = load(prefill, decode, 12)
    leg = Leg(ID, 7, 12)
    prefill.begin(leg, decode.incarnation)
    prefill.save(leg, 0, 5)
    net.run_quiet()
    prefill.save(leg, 0, 3)
    prefill.save(leg, 3, 4)
    prefill.save(leg, 7, 5)
    prefill.end(leg, True)
    net.run(2)
    assert decode.ended[request].num_blocks == 12
    assert_nothing_is_left(net)


def test_credit_smaller_than_a_transfer_delays_it_and_loses_nothing() -> None:
    net, prefill, decode = pair(settings(blocks=2))
    request = load(prefill, decode, 40)
    net.run_quiet()
    compute(prefill, decode, 40)
    net.run(5)
    assert decode.ended[request].num_blocks == 40
    assert prefill.source.counters.credit_stalls > 0
    assert_nothing_is_left(net)


def test_a_transfer_whose_leg_waits_holds_no_credit_that_another_needs() -> None:
    net, prefill, decode = pair(settings(blocks=16))
    slow = [bytes([9, n]) + bytes(14) for n in range(20)]
    for transfer_id in slow:
        load(prefill, decode, 8, transfer_id=transfer_id)
    net.run_quiet()
    request = load(prefill, decode, 32)
    compute(prefill, decode, 32)
    net.run(3)
    assert decode.ended[request].num_blocks == 32
    assert decode.target.outstanding_credit <= 16 * BLOCK_BYTES


def test_what_is_pinned_beyond_the_buffer_is_spilled_and_sent_from_there() -> None:
    net, prefill, decode = pair(settings(blocks=4))
    compute(prefill, decode, 24)
    net.run_quiet()
    assert prefill.source.num_spilled_blocks == 16  # the overflow pool is full
    assert prefill.source.num_pinned_blocks == 8
    request = load(prefill, decode, 24)
    net.run(5)
    assert decode.ended[request].num_blocks == 24
    assert_nothing_is_left(net)


def test_a_spill_that_fails_leaves_the_blocks_where_they_are() -> None:
    net, prefill, decode = pair(settings(blocks=64))
    leg = Leg(ID, 7, 6)
    prefill.begin(leg, decode.incarnation)
    prefill.save(leg, 0, 6)
    prefill.do(prefill.source.relieve(6))
    assert prefill.source.num_spilled_blocks == 6
    prefill.end_copy(False)
    assert prefill.source.num_spilled_blocks == 0
    assert prefill.source.num_pinned_blocks == 6
    prefill.end(leg, True)
    request = load(prefill, decode, 6)
    net.run(2)
    assert decode.ended[request].num_blocks == 6
    assert_nothing_is_left(net)


def test_blocks_on_their_way_to_spilled_memory_count_and_those_of_ended_legs_go_first() -> None:
    _, prefill, decode = pair(settings(blocks=64))
    legs = [Leg(bytes([number]) * 16, number, 4) for number in (1, 2, 3)]
    for leg in legs:
        prefill.begin(leg, decode.incarnation)
        prefill.save(leg, 0, 4)
    prefill.end(legs[1], True)
    prefill.do(prefill.source.relieve(4))
    prefill.do(prefill.source.relieve(4))
    (spill,) = prefill.copying
    assert [prefill.pool.blocks[block] for block in spill.blocks] == [content(2, index) for index in range(4)]
    prefill.do(prefill.source.relieve(6))
    assert len(prefill.copying) == 2


@pytest.mark.parametrize("draining", [False, True])
def test_a_pong_says_who_answers_and_whether_it_drains(draining: bool) -> None:
    _, prefill, _ = pair(settings())
    hello = ControlMessage(Hello("d" * 32, ("tcp",)), seq=1)
    prefill.source.message("peer", hello, 0.0)
    if draining:
        prefill.source.drain()
    (sent,) = prefill.source.message("peer", ControlMessage(Ping(), seq=2), 0.1)
    assert isinstance(sent, Send)
    assert sent.message.body == Pong(prefill.incarnation, draining)


def test_a_prompt_shorter_than_a_block_has_nothing_to_pass_on() -> None:
    net, prefill, decode = pair(settings("put"))
    leg = Leg(ID, 7, 0)
    prefill.begin(leg, decode.incarnation)
    prefill.end(leg, True)
    assert prefill.settled[ID].delivered
    assert_nothing_is_left(net)


def test_a_decode_engine_with_everything_frees_the_leg() -> None:
    net, prefill, decode = pair(settings())
    decode.do(decode.target.not_needed(ID, prefill.address, prefill.incarnation, net.now))
    leg = Leg(ID, 7, 4)
    prefill.begin(leg, decode.incarnation)
    prefill.save(leg, 0, 4)
    net.run_quiet()
    assert prefill.settled[ID].delivered
    assert_nothing_is_left(net)


def test_many_transfers_between_many_engines_all_succeed() -> None:
    net = Net(settings(blocks=24))
    prefills = [net.start_prefill(f"p:{n}") for n in range(2)]
    decodes = [net.start_decode(f"d{n}") for n in range(3)]
    requests = []
    for n in range(30):
        transfer_id = bytes([n]) * 15 + b"x"
        prefill, decode = prefills[n % 2], decodes[n % 3]
        requests.append((decode, load(prefill, decode, 1 + n % 17, transfer_id=transfer_id)))
        compute(prefill, decode, 1 + n % 17, transfer_id=transfer_id)
    net.run(10)
    assert all(decode.ended[request].num_blocks for decode, request in requests)
    assert_nothing_is_left(net)
