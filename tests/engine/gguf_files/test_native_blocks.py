"""Compiled kernels of every instruction set here read blocks as torch does, bit for bit, and multiply by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.gguf.blocks import BLOCK_TYPES, BY_NAME, BlockType
from pagefleet_engine.layers.quantization.block_slots import packed_weights
from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native import blocks as native_blocks
from pagefleet_kernels.native.blocks import KINDS, decode_blocks, lay_out_blocks, new_memory
from pagefleet_kernels.native.quantized import (
    MIDDLE,
    OFFSETS,
    STRIP,
    LaidOut,
    PackedProduct,
    input_block_of,
    lay_out,
    reference_product,
)
from pagefleet_kernels.packed_matmul import PackedWeights
from torch import Tensor

from tests.example_counts import examples
from tests.fakes.gguf_blocks import random_blocks as any_blocks
from tests.fakes.gguf_files import Type
from tests.fakes.native_kernels import native_libraries

SETS = native_libraries()

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels of the CPU were not compiled")


def random_blocks(kind: BlockType, rows: int, blocks: int, seed: int) -> Tensor:
    """Any bytes, but for scales that are no numbers; some rows are zeros, and scales of some are tiny."""
    random = np.random.default_rng(seed)
    found = random.integers(0, 256, (rows * blocks, kind.num_bytes), np.uint8)
    for start in _halves_of(kind):
        found[:, start + 1] &= random.choice(np.array([0x83, 0xBF, 0xFB], np.uint8), len(found))
    found = found.reshape(rows, -1)
    found[::7] = 0
    return torch.from_numpy(found)


def _halves_of(kind: BlockType) -> tuple[int, ...]:
    if kind.name == "Q6_K":
        return (208,)
    return (0, 2) if kind.name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.shared])
@settings(max_examples=examples(12), deadline=None)
@given(rows=st.integers(1, 140), blocks=st.integers(1, 11), seed=st.integers(0, 99), which=st.integers(0, 9))
def test_a_matrix_is_laid_out_as_by_torch(name: str, rows: int, blocks: int, seed: int, which: int) -> None:
    kind, library = BY_NAME[name], SETS[which % len(SETS)]
    stored = random_blocks(kind, rows, blocks, seed)
    weights = packed_weights(stored, kind)
    assert isinstance(weights, PackedWeights)
    found, expected = lay_out_blocks(library, KINDS[name], stored), lay_out(weights)
    assert found is not None
    assert found[2:] == expected[2:]
    assert torch.equal(found.row_scales_O.view(torch.int32), expected.row_scales_O.view(torch.int32))
    assert torch.equal(found.packed, expected.packed)


SHARED = [name for name, kind in KINDS.items() if kind.shared]


def values_of(matrix: LaidOut) -> Tensor:
    """float32 [O, I] that a matrix stands for whose groups share scales, as quantized.h says that it lies."""
    num_groups, parts = matrix.shared // matrix.group, 1 if matrix.zeros == MIDDLE else 2
    num_blocks = matrix.inputs // matrix.shared
    words = matrix.shared * matrix.bits // 32
    sizes = [parts * 2 * STRIP, parts * num_groups * STRIP, words * 4 * STRIP]
    halves, small, numbers = torch.split(matrix.packed.view(-1, num_blocks, sum(sizes)), sizes, 2)
    shared_SBPO = halves.contiguous().view(torch.float16).view(-1, num_blocks, parts, STRIP).float()
    small_SBPGO = small.contiguous().view(torch.int8).view(-1, num_blocks, parts, num_groups, STRIP).float()
    words_SBWOJ = numbers.reshape(-1, num_blocks, words, STRIP, 4)
    if matrix.bits == 4:
        fours = torch.stack([words_SBWOJ & 15, words_SBWOJ >> 4], 3)
    else:
        first, second, upper = words_SBWOJ.view(-1, num_blocks, words // 3, 3, STRIP, 4).unbind(3)
        lower = (first & 15, first >> 4, second & 15, second >> 4)
        fours = torch.stack([part | (upper >> 2 * nth & 3) << 4 for nth, part in enumerate(lower)], 3)
    codes_SBGKO = fours.flatten(2, 3).transpose(3, 4).reshape(-1, num_blocks, num_groups, matrix.group, STRIP).float()
    scales_SBPGO = shared_SBPO[:, :, :, None] * small_SBPGO
    middle = 0 if parts == 2 else 1 << (matrix.bits - 1)
    values = (codes_SBGKO - middle) * scales_SBPGO[:, :, 0, :, None]
    if parts == 2:
        values = values - scales_SBPGO[:, :, 1, :, None]
    return values.permute(0, 4, 1, 2, 3).reshape(-1, matrix.inputs)[: len(matrix.row_scales_O)]


@pytest.mark.parametrize("name", SHARED)
@settings(max_examples=examples(12), deadline=None)
@given(rows=st.integers(1, 140), blocks=st.integers(1, 3), seed=st.integers(0, 99), which=st.integers(0, 9))
def test_nothing_is_lost_where_groups_share_scales(name: str, rows: int, blocks: int, seed: int, which: int) -> None:
    kind, library = BY_NAME[name], SETS[which % len(SETS)]
    stored = random_blocks(kind, rows, blocks, seed)
    found = lay_out_blocks(library, KINDS[name], stored)
    assert found is not None
    assert (found.row_scales_O == 1.0).all()
    assert found.packed.numel() == -(-rows // STRIP) * STRIP * blocks * KINDS[name].packed_bytes
    assert torch.equal(values_of(found), kind.decode(stored.reshape(-1, kind.num_bytes)).view(rows, -1))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13])
def test_products_are_those_of_rounded_inputs(name: str, rows: int) -> None:
    kind, ours = BY_NAME[name], KINDS[name]
    stored = random_blocks(kind, 130, 512 // kind.numbers, 1)
    weights, x = packed_weights(stored, kind), torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
    expected = reference_product(x, weights, input_block=ours.shared or input_block_of(ours.group))
    for library in SETS:
        matrix = lay_out_blocks(library, ours, stored)
        assert matrix is not None
        found = PackedProduct(library, matrix)(x)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    kind, stored = BY_NAME[name], random_blocks(BY_NAME[name], 60, 1, 3)
    expected = kind.decode(stored).to(dtype)
    for library in SETS:
        found = torch.empty(expected.shape, dtype=dtype)
        decode_blocks(library, KINDS[name], stored, found)
        assert torch.equal(found.float().view(torch.int32), expected.float().view(torch.int32))


@pytest.mark.parametrize("name", KINDS)
def test_a_scale_that_is_no_number_is_noticed_anywhere(name: str) -> None:
    kind = BY_NAME[name]
    for start in _halves_of(kind):
        for bits in (0x7C00, 0xFC00, 0x7E01):
            stored = random_blocks(kind, 70, 2, 1)
            stored[69, kind.num_bytes + start : kind.num_bytes + start + 2] = torch.tensor([bits & 255, bits >> 8])
            assert all(lay_out_blocks(library, KINDS[name], stored) is None for library in SETS)


def test_kernels_and_the_file_s_reader_say_the_same_of_each_kind() -> None:
    for number, kind in BLOCK_TYPES.items():
        if (ours := KINDS.get(kind.name)) is not None:
            zeros, shared = OFFSETS if kind.has_offsets else MIDDLE, kind.numbers if kind.shares_scales else 0
            assert ours == (number, kind.numbers, kind.num_bytes, kind.bits, kind.group, zeros, shared)


@pytest.mark.parametrize("name", [kind.name for kind in BLOCK_TYPES.values() if kind.bits])
def test_matrices_take_as_much_as_whoever_plans_for_a_model_is_told(name: str) -> None:
    kind = BY_NAME[name]
    stored = torch.from_numpy(any_blocks(getattr(Type, name), STRIP, 512, seed=1))
    weights, blocks = packed_weights(stored, kind), STRIP * 512 // kind.numbers
    native = lay_out_blocks(SETS[0], KINDS[name], stored) if name in KINDS else weights
    assert native is not None
    product = PackedProduct(SETS[0], native)
    assert product.kept[0].nbytes == blocks * kind.cpu_bytes
    if kind.on_gpu:
        numbers = weights.numbers if isinstance(weights, PackedWeights) else weights.codes
        assert numbers.nbytes + weights.scales_OG.nbytes == blocks * kind.gpu_bytes


def test_what_is_no_whole_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedShapeError, match="not whole blocks of 34 bytes"):
        lay_out_blocks(SETS[0], KINDS["Q8_0"], torch.zeros(2, 35, dtype=torch.uint8))
    blocks = torch.zeros(2, 34, dtype=torch.uint8)
    for out in (torch.empty(64, dtype=torch.float16), torch.empty(63), torch.empty(2, 64)[:, ::2]):
        with pytest.raises(UnsupportedShapeError, match="are not read into"):
            decode_blocks(SETS[0], KINDS["Q8_0"], blocks, out)


def test_large_pages_leave_areas_of_memory_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have so many; a model of many experts has more matrices than half of that."""
    monkeypatch.setattr(native_blocks, "_MOST_MAPPED", len(native_blocks._mapped) + 2)
    pieces = [new_memory(3 << 20) for _ in range(4)]
    assert [piece.data_ptr() % (2 << 20) == 0 for piece in pieces] == [True, True, False, False]
    del pieces
    assert new_memory(3 << 20).data_ptr() % (2 << 20) == 0
