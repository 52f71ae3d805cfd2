"""Products in tiles of AMX against those in vectors, to the last bit: here by what its instructions are said to do.

On a processor that has them, the tests of all instruction sets try the instructions themselves.
"""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from pagefleet_kernels.native.library import FUNCTIONS, Library
from pagefleet_kernels.native.quantized import MIDDLE, OFFSETS, STRIP, LaidOut, PackedProduct, lay_out, lay_out_codes
from torch import Tensor

from tests.fakes.native_kernels import native_libraries
from tests.kernels.test_native_experts import RoundedLayer, routes
from tests.kernels.test_native_machines import native_build
from tests.kernels.test_native_quantized import make_coded, make_inputs, make_weights, seeded
from tests.kernels.twins import TILES, compile_twin

SETS = {library.instruction_set: library for library in native_libraries()}

pytestmark = pytest.mark.skipif("avx2" not in SETS or shutil.which("g++") is None, reason="needs AVX2 and g++")


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The kernels for AVX2, with tiles besides."""
    build = native_build()
    by_tiles = (TILES, "-DISA=twin", "-DVECTORS=avx2")
    units = [("strips", ["-DISA=avx2"]), *((source, by_tiles) for source in build.ONLY["avx512_amx"])]
    twin = compile_twin(tmp_path_factory.mktemp("tiles"), units, *build.INSTRUCTION_SETS["x86_64"]["avx2"])
    names = ("product_room", "run_product", "quantized_experts_room", "run_quantized_experts")
    return cast(Library, SimpleNamespace(**{name: FUNCTIONS[name]((f"{name}_twin", twin)) for name in names}))


def make_shared(outputs: int, inputs: int, bits: int, group: int, zeros: int, shared: int) -> LaidOut:
    """Groups that share scales: any bytes will do, but for scales of 16 bits."""
    make, strips, blocks = seeded(bits), -(-outputs // STRIP), inputs // shared
    parts = 2 if zeros == OFFSETS else 1
    halves = torch.randn(strips, blocks, parts * STRIP, generator=make).half().view(torch.uint8)
    size = parts * STRIP * (shared // group) + STRIP * shared * bits // 8
    others = torch.randint(0, 256, (strips, blocks, size), generator=make, dtype=torch.uint8)
    packed = torch.cat((halves, others), 2).flatten()
    return LaidOut(torch.rand(outputs, generator=make), packed, inputs, bits, group, zeros, shared=shared)


MATRICES: dict[str, LaidOut] = {
    **{
        f"{bits} bits, groups of {group}, zeros {zeros}": lay_out(make_weights(130, inputs, bits, group, zeros))
        for bits, group, inputs, zeros in (
            (4, 32, 96, "middle"),
            (4, 128, 256, "points"),
            (4, 64, 64, "offsets"),
            (4, 48, 96, "points"),
            (8, 32, 96, "middle"),
            (8, 16, 80, "points"),
            (8, 96, 192, "offsets"),
            (8, None, 240, "middle"),
            (8, None, 320, "middle"),
        )
    },
    "codes, groups of 32": lay_out_codes(make_coded(130, 96)),
    "codes, groups of 16": lay_out_codes(make_coded(70, 160, 16, "nf4", "float32")),
    "Q4_K": make_shared(130, 512, 4, 32, OFFSETS, 256),
    "4 bits, zero in the middle": make_shared(70, 256, 4, 16, MIDDLE, 128),
    "Q6_K": make_shared(130, 512, 6, 16, MIDDLE, 256),
    "6 bits, offsets": make_shared(70, 192, 6, 32, OFFSETS, 64),
}


def assert_same(product: PackedProduct, other: PackedProduct, x_TI: Tensor, scales_T: Tensor | None = None) -> None:
    found, expected = product(x_TI, scales_T=scales_T), other(x_TI, scales_T=scales_T)
    assert expected.abs().max() > 0.1
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 4, 5, 15, 16, 17, 33, 47, 48, 49, 53, 54, 101])
@pytest.mark.parametrize("name", MATRICES)
def test_products_are_those_of_vectors(tiles: Library, name: str, rows: int) -> None:
    matrix = MATRICES[name]
    x = make_inputs(rows, matrix.inputs)
    assert_same(PackedProduct(tiles, matrix), PackedProduct(SETS["avx2"], matrix), x)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_that_are_rounded_as_one(tiles: Library, bits: int) -> None:
    for inputs in (64, 160, 336):
        matrix, x = lay_out(make_weights(70, inputs - inputs % 32, bits, None)), make_inputs(50, inputs - inputs % 32)
        one, other = (PackedProduct(each, matrix, input_block=matrix.inputs) for each in (tiles, SETS["avx2"]))
        assert_same(one, other, x, torch.linspace(0.01, 0.2, 50))


def test_the_largest_numbers(tiles: Library) -> None:
    for bits, zeros in ((8, "middle"), (8, "points"), (4, "offsets")):
        weights = make_weights(64, 256, bits, 64, zeros)
        weights.numbers.fill_(255)
        matrix, x = lay_out(weights), torch.full((20, 256), -127.0)
        assert_same(PackedProduct(tiles, matrix), PackedProduct(SETS["avx2"], matrix), x)


@pytest.mark.parametrize("how", ["codes", "awq", "q8_0", "int8"])
def test_experts_are_those_of_vectors(tiles: Library, how: str) -> None:
    """Some of few rows, some of many, some of none."""
    x, where = torch.randn(90, 96, generator=seeded(1)), routes(90, 3, 6)
    one, other = (RoundedLayer(each, how, 6, (96, 160), "silu", how == "int8") for each in (tiles, SETS["avx2"]))
    assert torch.equal(one.packed(x, *where), other.packed(x, *where))
