"""Experts on a CPU by compiled kernels.

Shapes: as in experts.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pagefleet_kernels.expert_gates import Gate
from pagefleet_kernels.native.experts import PackedExperts, pack_matrix
from pagefleet_kernels.native.library import Library
from torch import Tensor

from pagefleet_engine.layers.matrix import Matrix
from pagefleet_engine.layers.moe.experts import with_room
from pagefleet_engine.layers.moe.routing import Routes


class NativeExperts:
    """Implements `Experts` over matrices in the model's own type, where `takes_experts` says so.

    Gate, up and down of a row are rounded once, before `down`; the sum is of float32.
    """

    __slots__ = ("_down_bias_ED", "_gate_up_bias_EO", "_num_experts", "_packed")

    def __init__(
        self, library: Library, num_experts: int, hidden_size: int, width: int, gate: Gate, dtype: torch.dtype
    ) -> None:
        self._num_experts = num_experts
        self._packed = PackedExperts(library, num_experts, hidden_size, width, gate, dtype)
        self._gate_up_bias_EO: Tensor | None = None
        self._down_bias_ED: Tensor | None = None

    def install_gate_up(self, expert: int, matrix: Matrix) -> None:
        """See Experts."""
        (weight_OI,) = matrix.stored
        self._packed.put_gate_up(expert, torch.cat([pack_matrix(part) for part in weight_OI.chunk(2)]))

    def install_down(self, expert: int, matrix: Matrix) -> None:
        """See Experts."""
        (weight_OI,) = matrix.stored
        self._packed.put_down(expert, pack_matrix(weight_OI))

    def install_gate_up_bias(self, bias_EO: Tensor) -> None:
        """See Experts."""
        self._gate_up_bias_EO = with_room(bias_EO.float(), self._num_experts)
        self._packed.put_biases(self._gate_up_bias_EO, self._down_bias_ED)

    def install_down_bias(self, bias_ED: Tensor) -> None:
        """See Experts."""
        self._down_bias_ED = with_room(bias_ED.float(), self._num_experts)
        self._packed.put_biases(self._gate_up_bias_EO, self._down_bias_ED)

    def stored(self, expert: int) -> list[Tensor]:
        """See Experts; packed, so that it moves as it is."""
        return [*self._packed.stored(expert), *(bias_EO[expert] for bias_EO in self._biases())]

    def take(self, expert: int, stored: Sequence[Tensor]) -> None:
        """See Experts."""
        gate_up, down, *biases = stored
        self._packed.put_gate_up(expert, gate_up)
        self._packed.put_down(expert, down)
        for bias_EO, bias_O in zip(self._biases(), biases, strict=True):
            bias_EO[expert] = bias_O

    def _biases(self) -> list[Tensor]:
        return [bias_EO for bias_EO in (self._gate_up_bias_EO, self._down_bias_ED) if bias_EO is not None]

    def __call__(self, x_RD: Tensor, routes: Routes) -> Tensor:
        """See Experts."""
        return self._packed(x_RD, routes.weights_TK, routes.experts_TK)
