"""A layer of experts on a CPU, over matrices that are packed once.

Shapes: R rows, K experts of each, E experts, D hidden size, G width of an expert, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import addressof, byref, c_void_p

import torch
from torch import Tensor

from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.native.library import Experts, Library, Routed

_GATES: Mapping[Gate, int] = {"silu": 0, "gelu_tanh": 1, "relu": 2, "swigluoai": 3}
_BLOCK = 64
_STEP = 16
_WORTH_A_THREAD = 1 << 18
"""Products of two numbers that one thread computes sooner than another wakes."""


def takes_experts(library: Library, dtype: torch.dtype, hidden: int, width: int, gate: Gate) -> bool:
    """Whether the kernels are for such experts."""
    multiplies = dtype == torch.float32 or (dtype == torch.bfloat16 and library.multiplies_bf16)
    return multiplies and gate in _GATES and hidden % _STEP == 0 and width % _STEP == 0


def pack_matrix(weight_OI: Tensor) -> Tensor:
    """A copy as the kernels read it, of one dimension and as many bytes; see `Experts` in kernels.h."""
    units_OU = weight_OI.contiguous().view(torch.int32)
    whole = len(units_OU) // _BLOCK * _BLOCK
    blocks = units_OU[:whole].view(-1, _BLOCK, units_OU.shape[1]).transpose(1, 2)
    return torch.cat((blocks.flatten(), units_OU[whole:].t().flatten()))


class PackedExperts:
    """The experts of a layer; kernels read them where they lie, so each is kept here."""

    def __init__(self, library: Library, num_experts: int, hidden: int, width: int, gate: Gate, dtype: torch.dtype):
        """Of a kind that `takes_experts` says."""
        self._library, self._hidden, self._width = library, hidden, width
        pointers = c_void_p * num_experts
        self._gate_up, self._down = pointers(), pointers()
        self._kept: dict[tuple[str, int], Tensor] = {}
        self._experts = Experts(
            gate_up=addressof(self._gate_up),
            down=addressof(self._down),
            num_experts=num_experts,
            hidden=hidden,
            width=width,
            gate=_GATES[gate],
            is_bf16=dtype == torch.bfloat16,
        )

    def put_gate_up(self, expert: int, packed: Tensor) -> None:
        """Gate [G, D] and up, each packed, one behind the other."""
        self._kept["gate_up", expert] = packed
        self._gate_up[expert] = packed.data_ptr()

    def put_down(self, expert: int, packed: Tensor) -> None:
        """Down [D, G]."""
        self._kept["down", expert] = packed
        self._down[expert] = packed.data_ptr()

    def put_biases(self, gate_up_EO: Tensor | None, down_ED: Tensor | None) -> None:
        """Gate over up, [E, 2G], and [E, D]; float32. They may be written to later."""
        self._biases = (gate_up_EO, down_ED)
        self._experts.gate_up_bias = None if gate_up_EO is None else gate_up_EO.data_ptr()
        self._experts.down_bias = None if down_ED is None else down_ED.data_ptr()

    def stored(self, expert: int) -> list[Tensor]:
        """What was put of its matrices."""
        return [self._kept["gate_up", expert], self._kept["down", expert]]

    def __call__(self, x_RD: Tensor, weights_RK: Tensor, experts_RK: Tensor) -> Tensor:
        """Each row's experts, weighted (float32) and added up, [R, D] in x's dtype; of number -1 (int32): nowhere."""
        x_RD = x_RD if x_RD.stride(-1) == 1 else x_RD.contiguous()
        weights_RK, experts_RK = weights_RK.contiguous(), experts_RK.contiguous()
        num_rows, top_k = experts_RK.shape
        out_RD = torch.empty((num_rows, self._hidden), dtype=x_RD.dtype)
        routed = Routed(
            x=x_RD.data_ptr(),
            x_stride=x_RD.stride(0),
            out=out_RD.data_ptr(),
            experts=experts_RK.data_ptr(),
            weights=weights_RK.data_ptr(),
            num_rows=num_rows,
            top_k=top_k,
        )
        memory = torch.empty(self._library.experts_room(self._experts, num_rows * top_k), dtype=torch.uint8)
        work = num_rows * top_k * self._hidden * self._width
        threads = min(torch.get_num_threads(), 1 + work // _WORTH_A_THREAD)
        self._library.run_experts(byref(self._experts), byref(routed), memory.data_ptr(), threads)
        return out_RD
