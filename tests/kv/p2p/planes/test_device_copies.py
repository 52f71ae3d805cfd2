"""Gathering, scattering and summing of blocks, on the CPU."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies, folded

from tests.fakes.device_planes import TorchPool

BLOCK_BYTES = 24
SLOT_BYTES = 12 * BLOCK_BYTES


def filled() -> TorchPool:
    pool = TorchPool(32, BLOCK_BYTES)
    pool.blocks[:] = torch.from_numpy(torch.arange(32 * BLOCK_BYTES).numpy().astype("uint8")).view(32, BLOCK_BYTES)
    return pool


def total_of(data: bytes) -> int:
    """Of a slot that begins with data and goes on with something else."""
    copies = DeviceCopies(TorchPool(1, 8), SLOT_BYTES)
    slot = torch.full((SLOT_BYTES,), 0xAB, dtype=torch.uint8)
    copies.load(memoryview(bytearray(data)), slot)
    total = copies.total(slot, len(data))
    total.mark.wait()
    return total.value()


def expected(data: bytes) -> int:
    """The sum, in plain Python."""
    data += bytes(-len(data) % 8)
    total = 0
    for at in range(0, len(data), 8):
        word = int.from_bytes(data[at : at + 8], "little")
        total += (word ^ (word >> 32)) * (at // 4 + 1)
    total %= 1 << 64
    return total - (1 << 64) if total >= 1 << 63 else total


@given(st.binary(min_size=1, max_size=SLOT_BYTES))
def test_the_total_is_what_it_is_said_to_be(data: bytes) -> None:
    assert total_of(data) == expected(data)


@given(st.binary(min_size=8, max_size=SLOT_BYTES), st.data())
def test_a_changed_byte_is_found(data: bytes, draw: st.DataObject) -> None:
    at = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[at] ^= draw.draw(st.integers(1, 255))
    assert total_of(bytes(changed)) != total_of(data)


def test_words_that_changed_places_and_one_bit_in_all_of_them_are_found() -> None:
    words = [random.Random(number).randbytes(8) for number in range(16)]
    swapped = [words[3], *words[1:3], words[0], *words[4:]]
    assert total_of(b"".join(swapped)) != total_of(b"".join(words))
    for bit in range(64):
        flipped = [(int.from_bytes(word, "little") ^ (1 << bit)).to_bytes(8, "little") for word in words]
        assert total_of(b"".join(flipped)) != total_of(b"".join(words))


def test_totals_fold_into_what_events_carry() -> None:
    totals = [total_of(bytes([number]) * 64) for number in range(256)]
    assert all(0 <= folded(total) < 1 << 32 for total in [*totals, -1, -(1 << 63), (1 << 63) - 1])
    assert len({folded(total) for total in totals}) == 256


@given(st.lists(st.integers(0, 31), min_size=1, max_size=12, unique=True), st.randoms(use_true_random=False))
def test_blocks_go_to_a_slot_and_from_there_to_others(blocks: list[int], draw: random.Random) -> None:
    source, target = filled(), TorchPool(32, BLOCK_BYTES)
    into = draw.sample(range(32), len(blocks))
    slot = DeviceCopies(source, SLOT_BYTES).slots(1)[0]
    DeviceCopies(source, SLOT_BYTES).gather(blocks, slot)
    DeviceCopies(target, SLOT_BYTES).scatter(slot, into)
    assert [target.peek(block) for block in into] == [source.peek(block) for block in blocks]
    assert all(target.peek(block) == bytes(BLOCK_BYTES) for block in set(range(32)) - set(into))
