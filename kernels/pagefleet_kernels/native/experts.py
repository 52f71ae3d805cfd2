"""A layer of experts on a CPU, over matrices that are packed once: floats, or numbers of 4 or 8 bits.

Shapes: R rows, K experts of each, E experts, D hidden size, G width of an expert, I inputs, O outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from ctypes import Array, addressof, byref, c_void_p

import torch
from torch import Tensor

from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.native.attention import DTYPES
from pagefleet_kernels.native.dense import lay_out_dense
from pagefleet_kernels.native.library import Experts, Library, Packed, QuantizedExperts, Routed
from pagefleet_kernels.native.quantized import PackedProduct

_GATES: Mapping[Gate, int] = {"silu": 0, "gelu_tanh": 1, "relu": 2, "swigluoai": 3}
_STEP = 16
_WORTH_A_THREAD = 1 << 18
"""Products of two numbers that one thread computes sooner than another wakes."""


def takes_experts(dtype: torch.dtype, hidden: int, width: int, gate: Gate) -> bool:
    """Whether the kernels are for such experts."""
    return dtype in DTYPES and joins(gate) and hidden % _STEP == 0 and width % _STEP == 0


def joins(gate: Gate) -> bool:
    """Whether the kernels join gate and up so."""
    return gate in _GATES


class _Layer(ABC):
    """What both kinds of layers do."""

    def __init__(self, library: Library, num_experts: int, hidden: int, width: int, gate: Gate, dtype: torch.dtype):
        self._library = library
        self.hidden, self.width = hidden, width
        self._experts = Experts(
            num_experts=num_experts,
            hidden=hidden,
            width=width,
            gate=_GATES[gate],
            is_bf16=dtype == torch.bfloat16,
        )

    def put_biases(self, gate_up_EO: Tensor | None, down_ED: Tensor | None) -> None:
        """Gate over up, [E, 2G], and [E, D]; float32. They may be written to later."""
        self._biases = (gate_up_EO, down_ED)
        self._experts.gate_up_bias = None if gate_up_EO is None else gate_up_EO.data_ptr()
        self._experts.down_bias = None if down_ED is None else down_ED.data_ptr()

    @abstractmethod
    def stored(self, expert: int) -> list[Tensor]:
        """What was put of its matrices."""

    @abstractmethod
    def take(self, expert: int, stored: Sequence[Tensor]) -> None:
        """Put what `stored` gave of another expert."""

    def __call__(self, x_RD: Tensor, weights_RK: Tensor, experts_RK: Tensor) -> Tensor:
        """Each row's experts, weighted (float32) and added up, [R, D] in x's dtype; of number -1 (int32): nowhere."""
        x_RD = x_RD if x_RD.stride(-1) == 1 else x_RD.contiguous()
        weights_RK, experts_RK = weights_RK.contiguous(), experts_RK.contiguous()
        num_rows, top_k = experts_RK.shape
        out_RD = torch.empty((num_rows, self.hidden), dtype=x_RD.dtype)
        routed = Routed(
            x=x_RD.data_ptr(),
            x_stride=x_RD.stride(0),
            out=out_RD.data_ptr(),
            experts=experts_RK.data_ptr(),
            weights=weights_RK.data_ptr(),
            num_rows=num_rows,
            top_k=top_k,
        )
        work = num_rows * top_k * self.hidden * self.width
        self._run(routed, min(torch.get_num_threads(), 1 + work // _WORTH_A_THREAD))
        return out_RD

    @abstractmethod
    def _run(self, routed: Routed, threads: int) -> None: ...


class PackedExperts(_Layer):
    """The experts of a layer in floats; kernels read them where they lie, so each is kept here."""

    def __init__(self, library: Library, num_experts: int, hidden: int, width: int, gate: Gate, dtype: torch.dtype):
        """Of a kind that `takes_experts` says."""
        super().__init__(library, num_experts, hidden, width, gate, dtype)
        self._kept: dict[tuple[str, int], Tensor] = {}
        pointers = c_void_p * num_experts
        self._gate_up, self._down = pointers(), pointers()
        self._experts.gate_up, self._experts.down = addressof(self._gate_up), addressof(self._down)

    def lay_out(self, *weights_OI: Tensor) -> Tensor:
        """Matrices as the kernels read them, one behind the other."""
        return torch.cat([lay_out_dense(self._library, weight_OI)[0] for weight_OI in weights_OI])

    def put_gate_up(self, expert: int, packed: Tensor) -> None:
        """Gate [G, D] and up, laid out."""
        self._kept["gate_up", expert] = packed
        self._gate_up[expert] = packed.data_ptr()

    def put_down(self, expert: int, packed: Tensor) -> None:
        """Down [D, G], laid out."""
        self._kept["down", expert] = packed
        self._down[expert] = packed.data_ptr()

    def stored(self, expert: int) -> list[Tensor]:
        """What was put of its matrices."""
        return [self._kept["gate_up", expert], self._kept["down", expert]]

    def take(self, expert: int, stored: Sequence[Tensor]) -> None:
        """Put what `stored` gave of another expert."""
        gate_up, down = stored
        self.put_gate_up(expert, gate_up)
        self.put_down(expert, down)

    def _run(self, routed: Routed, threads: int) -> None:
        pairs = routed.num_rows * routed.top_k
        memory = torch.empty(self._library.experts_room(self._experts, pairs), dtype=torch.uint8)
        self._library.run_experts(byref(self._experts), byref(routed), memory.data_ptr(), threads)


class RoundedExperts(_Layer):
    """The same in numbers of 4 or 8 bits, by inputs in 8: of all experts gates and ups are alike, and downs are."""

    def __init__(
        self,
        library: Library,
        num_experts: int,
        hidden: int,
        width: int,
        gate: Gate,
        dtype: torch.dtype,
        *,
        rounds_rows: bool = False,
    ):
        """`rounds_rows`: the inputs of a matrix as one; else by the blocks of its product. Type and gate as in
        `takes_experts`, sizes as in `takes_packed`."""
        super().__init__(library, num_experts, hidden, width, gate, dtype)
        places = Packed * num_experts
        self._gate, self._up, self._down = places(), places(), places()
        self._gates: dict[int, tuple[PackedProduct, PackedProduct]] = {}
        self._downs: dict[int, PackedProduct] = {}
        self._rounded = QuantizedExperts(
            gate=addressof(self._gate), up=addressof(self._up), down=addressof(self._down), rounds_rows=rounds_rows
        )

    def put_gate_up(self, expert: int, gate: PackedProduct, up: PackedProduct) -> None:
        """Gate [G, D] and up."""
        self._gates[expert] = gate, up
        _put(self._gate, expert, gate)
        _put(self._up, expert, up)

    def put_down(self, expert: int, down: PackedProduct) -> None:
        """Down [D, G]."""
        self._downs[expert] = down
        _put(self._down, expert, down)

    def stored(self, expert: int) -> list[Tensor]:
        """What was put of its matrices."""
        return [part for product in self._products(expert) for part in product.kept]

    def take(self, expert: int, stored: Sequence[Tensor]) -> None:
        """Put what `stored` gave of another expert."""
        left = iter(stored)
        gate, up, down = (like.of([next(left) for _ in like.kept]) for like in self._products(next(iter(self._gates))))
        self.put_gate_up(expert, gate, up)
        self.put_down(expert, down)

    def _products(self, expert: int) -> tuple[PackedProduct, PackedProduct, PackedProduct]:
        return *self._gates[expert], self._downs[expert]

    def _run(self, routed: Routed, threads: int) -> None:
        self._rounded.layer = self._experts
        pairs = routed.num_rows * routed.top_k
        memory = torch.empty(self._library.quantized_experts_room(self._rounded, pairs), dtype=torch.uint8)
        self._library.run_quantized_experts(byref(self._rounded), byref(routed), memory.data_ptr(), threads)


def _put(places: Array[Packed], expert: int, product: PackedProduct) -> None:
    """The first place says what all are like."""
    places[expert] = product.matrix
    if not places[0].inputs:
        places[0] = product.matrix
