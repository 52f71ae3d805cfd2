"""The compiled experts against each row's own matrices, for every instruction set that this processor has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.native.experts import PackedExperts, RoundedExperts, takes_experts
from pagefleet_kernels.native.library import Library
from pagefleet_kernels.native.quantized import PackedProduct, reference_product
from pagefleet_kernels.packed_matmul import PackedWeights
from pagefleet_kernels.reference_experts import _joined
from torch import Tensor

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries
from tests.kernels.test_native_quantized import make_coded, make_weights

SETS = {library.instruction_set: library for library in native_libraries()}
GATES: tuple[Gate, ...] = ("silu", "gelu_tanh", "relu", "swigluoai")

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels of the CPU were not compiled")


@pytest.fixture(params=[*SETS] or ["none"])
def library(request: pytest.FixtureRequest) -> Library:
    return SETS[request.param]


class Layer:
    """Experts with random numbers, packed, and as they are; the last has none."""

    def __init__(self, library: Library, experts: int, hidden: int, width: int, gate: Gate, dtype: torch.dtype) -> None:
        make = torch.Generator().manual_seed(hidden * width)
        self.gate_up = torch.randn(experts, 2 * width, hidden, generator=make).to(dtype) / hidden**0.5
        self.down = torch.randn(experts, hidden, width, generator=make).to(dtype) / width**0.5
        self.biases = torch.randn(experts, 2 * width, generator=make), torch.randn(experts, hidden, generator=make)
        self.gate, self.dtype, self.is_biased = gate, dtype, False
        self.packed = PackedExperts(library, experts, hidden, width, gate, dtype)
        for expert in range(experts - 1):
            self.packed.put_gate_up(expert, self.packed.lay_out(*self.gate_up[expert].chunk(2)))
            self.packed.put_down(expert, self.packed.lay_out(self.down[expert]))

    def add_biases(self) -> None:
        self.is_biased = True
        self.packed.put_biases(*self.biases)

    def exact(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for row, (of_row, by) in enumerate(zip(experts.tolist(), weights, strict=True)):
            for expert, weight in zip(of_row, by, strict=True):
                if expert < 0:
                    continue
                joint = self.gate_up[expert].float() @ x[row].float()
                joint = joint + self.biases[0][expert] if self.is_biased else joint
                gated = _joined(joint[None], self.gate)[0].to(self.dtype).float()
                result = self.down[expert].float() @ gated
                out[row] += weight * (result + self.biases[1][expert] if self.is_biased else result)
        return out


def routes(rows: int, top_k: int, experts: int) -> tuple[Tensor, Tensor]:
    """Weights and experts; some rows go nowhere, and none to the last expert."""
    make = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, experts - 1, generator=make).topk(top_k).indices.to(torch.int32)
    chosen[torch.rand(rows, generator=make) < 0.2] = -1
    return torch.rand(rows, top_k, generator=make), chosen


def out_of_any_threads(packed: PackedExperts | RoundedExperts, x: Tensor, where: tuple[Tensor, Tensor]) -> Tensor:
    """What one thread gives, and several too."""
    before, outs = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            outs.append(packed(x, *where))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)
    return outs[0]


@given(
    rows=st.integers(0, 70),
    sizes=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    experts=st.integers(2, 9),
    gate=st.sampled_from(GATES),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    is_biased=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(60), deadline=None)
def test_each_row_gets_what_its_experts_give(
    rows: int,
    sizes: tuple[int, int],
    experts: int,
    gate: Gate,
    dtype: torch.dtype,
    is_biased: bool,
    data: st.DataObject,
) -> None:
    library = SETS[data.draw(st.sampled_from([*SETS]))]
    hidden, width = 16 * sizes[0], 16 * sizes[1]
    layer = Layer(library, experts, hidden, width, gate, dtype)
    if is_biased:
        layer.add_biases()
    x = torch.randn(rows, 2 * hidden, generator=torch.Generator().manual_seed(1)).to(dtype)[:, :hidden]
    where = routes(rows, data.draw(st.integers(1, min(experts - 1, 4))), experts)
    out = layer.packed(x, *where)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), layer.exact(x, *where), rtol=tolerance, atol=tolerance)


def test_many_threads_give_what_one_gives(library: Library) -> None:
    layer = Layer(library, 9, 256, 384, "silu", torch.float32)
    x, where = torch.randn(130, 256), routes(130, 4, 9)
    out = out_of_any_threads(layer.packed, x, where)
    torch.testing.assert_close(out, layer.exact(x, *where), rtol=1e-5, atol=1e-5)


def test_what_is_no_number_stays_in_its_row(library: Library) -> None:
    layer = Layer(library, 4, 64, 96, "silu", torch.float32)
    x, (weights, experts) = torch.randn(9, 64), routes(9, 2, 4)
    experts[4] = torch.tensor([0, 1])
    x[4] = torch.nan
    out = layer.packed(x, weights, experts)
    others = torch.arange(9) != 4
    assert out[4].isnan().all()
    assert out[others].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "hidden", "width", "gate"),
    [
        (torch.float32, 24, 32, "silu"),
        (torch.float32, 32, 40, "silu"),
        (torch.float32, 32, 32, "gelu"),
        (torch.float16, 32, 32, "silu"),
    ],
)
def test_other_kinds_are_left_to_torch(dtype: torch.dtype, hidden: int, width: int, gate: Gate) -> None:
    assert takes_experts(torch.float32, 32, 32, "silu")
    assert not takes_experts(dtype, hidden, width, gate)


class RoundedLayer:
    """Experts with random numbers of a few bits; the last has none."""

    def __init__(
        self, library: Library, how: str, experts: int, sizes: tuple[int, int], gate: Gate, rows: bool
    ) -> None:
        hidden, width = sizes
        self.weights = [
            (self._weights(how, width, hidden, 3 * e), self._weights(how, width, hidden, 3 * e + 1),
             self._weights(how, hidden, width, 3 * e + 2))
            for e in range(experts - 1)
        ]  # fmt: skip
        make = torch.Generator().manual_seed(hidden)
        self.biases = torch.randn(experts, 2 * width, generator=make), torch.randn(experts, hidden, generator=make)
        self.gate, self.rounds_rows, self.library = gate, rows, library
        self.packed = RoundedExperts(library, experts, hidden, width, gate, torch.float32, rounds_rows=rows)
        for expert, weights in enumerate(self.weights):
            gate_w, up, down = (PackedProduct(library, one) for one in weights)
            self.packed.put_gate_up(expert, gate_w, up)
            self.packed.put_down(expert, down)
        self.packed.put_biases(*self.biases)

    @staticmethod
    def _weights(how: str, outputs: int, inputs: int, seed: int) -> PackedWeights | CodedWeights:
        if how == "codes":
            coded = make_coded(outputs, inputs)
            return replace(coded, codes=coded.codes.roll(seed, 0))
        bits, group, zeros = {"awq": (4, 32, "points"), "q8_0": (8, 32, "middle"), "q6_k": (8, 16, "middle"),
                              "q4_k": (4, 32, "offsets"), "int8": (8, None, "middle")}[how]  # fmt: skip
        return make_weights(outputs, inputs, bits, group, zeros, seed)

    def expected(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """By products one after another."""
        out = torch.zeros(x.shape)
        for row, (of_row, by) in enumerate(zip(experts.tolist(), weights, strict=True)):
            for expert, weight in zip(of_row, by, strict=True):
                if expert < 0:
                    continue
                gate_w, up, down = self.weights[expert]
                joint = torch.cat([self._product(x[row : row + 1], one) for one in (gate_w, up)], 1)
                gated = _joined(joint + self.biases[0][expert], self.gate)
                out[row] += weight * (self._product(gated, down)[0] + self.biases[1][expert])
        return out

    def _product(self, x: Tensor, weights: PackedWeights | CodedWeights) -> Tensor:
        scales = x.abs().amax(1) / 127 if self.rounds_rows else None
        return reference_product(x, weights, scales_T=scales)


HOW = ("codes", "awq", "q8_0", "q6_k", "q4_k", "int8")


@given(
    rows=st.integers(0, 40),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    experts=st.integers(2, 7),
    gate=st.sampled_from(GATES),
    how=st.sampled_from(HOW),
    rounds_rows=st.booleans(),
    data=st.data(),
)
@settings(max_examples=examples(60), deadline=None)
def test_experts_in_few_bits(
    rows: int,
    sizes: tuple[int, int],
    experts: int,
    gate: Gate,
    how: str,
    rounds_rows: bool,
    data: st.DataObject,
) -> None:
    """But for the few numbers between the matrices that are rounded the other way."""
    library = SETS[data.draw(st.sampled_from([*SETS]))]
    layer = RoundedLayer(library, how, experts, (32 * sizes[0], 32 * sizes[1]), gate, rounds_rows)
    x = torch.randn(rows, 64 * sizes[0], generator=torch.Generator().manual_seed(1))[:, : 32 * sizes[0]]
    where = routes(rows, data.draw(st.integers(1, min(experts - 1, 4))), experts)
    out, expected = layer.packed(x, *where), layer.expected(x, *where)
    assert (out - expected).norm() <= 0.005 * expected.norm() + 1e-6
    assert (out - expected).abs().max() <= 0.02 * expected.abs().max() if rows else True
    assert not out[(where[1] < 0).all(1)].any()


def test_experts_in_few_bits_by_many_threads_and_in_bfloat16(library: Library) -> None:
    layer = RoundedLayer(library, "awq", 9, (256, 384), "silu", rows=False)
    x, where = torch.randn(130, 256), routes(130, 4, 9)
    out = out_of_any_threads(layer.packed, x, where)
    short = RoundedExperts(library, 9, 256, 384, "silu", torch.bfloat16)
    for expert in range(8):
        short.take(expert, [*layer.packed.stored(expert)]) if expert else _put_first(short, layer)
    short.put_biases(*layer.biases)
    found = short(x.bfloat16(), *where)
    assert found.dtype == torch.bfloat16
    assert (found.float() - out).norm() < 0.02 * out.norm()


def _put_first(experts: RoundedExperts, layer: RoundedLayer) -> None:
    gate, up, down = (PackedProduct(layer.library, one) for one in layer.weights[0])
    experts.put_gate_up(0, gate, up)
    experts.put_down(0, down)
