"""The experts' products, in the modular cut that every form of experts and every way between ranks shares:

    prepare      rows and routes as this rank's experts need them (exchange.py)
    experts      each row through its experts, weighted and added up
    finalize     the rows' results on the ranks that they came from (exchange.py)

Shapes: T tokens of the step, R rows that this rank's experts see, K experts of a row, P = R * K pairs, E experts,
D hidden size, G width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from pagefleet_kernels.expert_gates import Gate
from torch import Tensor

from pagefleet_engine.layers.linear_kernel import LinearKernel, activate
from pagefleet_engine.layers.matrix import Matrix
from pagefleet_engine.layers.moe.routing import NOWHERE, Routes


class Experts(Protocol):
    """All experts of a layer, on one rank."""

    def install_gate_up(self, expert: int, matrix: Matrix) -> None:
        """Gate over up, [2G, D]; each expert's comes once."""
        ...

    def install_down(self, expert: int, matrix: Matrix) -> None:
        """[D, G]; each expert's comes once."""
        ...

    def install_gate_up_bias(self, bias_EO: Tensor) -> None:
        """Gate over up, [E, 2G], where experts have biases."""
        ...

    def install_down_bias(self, bias_ED: Tensor) -> None:
        """[E, D], where experts have biases."""
        ...

    def stored(self, expert: int) -> list[Tensor]:
        """All that there is of an expert, for `take`; of the same shapes and types for all of a layer."""
        ...

    def take(self, expert: int, stored: Sequence[Tensor]) -> None:
        """From now on the number is that of another expert."""
        ...

    def __call__(self, x_RD: Tensor, routes: Routes) -> Tensor:
        """A new tensor [R, D] in x's dtype: over each row's experts, `weight * down(act(gate(x)) * up(x))` or what
        else the `Gate` makes of gate and up, added up in float32. Rows that go NOWHERE are zero."""
        ...


def over_scaled_inputs(experts: Experts, x_RD: Tensor, routes: Routes) -> Tensor:
    """The same where weights multiply what an expert reads: `down(act(gate(weight * x)) * up(weight * x))`.

    Each pair of a row and an expert becomes a row.
    """
    num_rows, top_k = routes.experts_TK.shape
    x_PD = (x_RD[:, None] * routes.weights_TK[..., None].to(x_RD.dtype)).flatten(0, 1)
    each = Routes(torch.ones_like(routes.weights_TK).view(-1, 1), routes.experts_TK.reshape(-1, 1))
    out_PD = experts(x_PD, each)
    return out_PD if top_k == 1 else out_PD.view(num_rows, top_k, x_RD.shape[-1]).sum(1)


class HostExperts:
    """Implements `Experts` by two products for each expert that is in use, over its rows side by side.

    Rows are sorted by expert, so that each matrix is read once; what follows a product is done for all rows at once.
    """

    __slots__ = ("_down", "_down_bias_ED", "_gate", "_gate_up", "_gate_up_bias_EO", "_hidden", "_kept", "_width")

    def __init__(self, num_experts: int, hidden_size: int, width: int, gate: Gate, *, keeps: bool = False) -> None:
        """`keeps`: matrices besides what multiplies by them, so that experts may move."""
        self._kept: tuple[dict[int, Matrix], dict[int, Matrix]] | None = ({}, {}) if keeps else None
        self._hidden, self._width, self._gate = hidden_size, width, gate
        self._gate_up_bias_EO: Tensor | None = None
        self._down_bias_ED: Tensor | None = None
        self._gate_up: list[LinearKernel | None] = [None] * num_experts
        self._down: list[LinearKernel | None] = [None] * num_experts

    def install_gate_up(self, expert: int, matrix: Matrix) -> None:
        """See Experts."""
        self._gate_up[expert] = matrix.kernel(0, 2 * self._width)
        if self._kept is not None:
            self._kept[0][expert] = matrix

    def install_down(self, expert: int, matrix: Matrix) -> None:
        """See Experts."""
        self._down[expert] = matrix.kernel(0, self._hidden)
        if self._kept is not None:
            self._kept[1][expert] = matrix

    def install_gate_up_bias(self, bias_EO: Tensor) -> None:
        """See Experts."""
        self._gate_up_bias_EO = with_room(bias_EO, len(self._gate_up))

    def install_down_bias(self, bias_ED: Tensor) -> None:
        """See Experts."""
        self._down_bias_ED = with_room(bias_ED, len(self._down))

    def stored(self, expert: int) -> list[Tensor]:
        """See Experts."""
        assert self._kept is not None, "what moves is kept"
        matrices = [part for kept in self._kept for part in kept[expert].stored]
        return matrices + [bias_EO[expert] for bias_EO in self._biases()]

    def take(self, expert: int, stored: Sequence[Tensor]) -> None:
        """See Experts."""
        assert self._kept is not None, "what moves is kept"
        left = iter(stored)
        for kept, install in zip(self._kept, (self.install_gate_up, self.install_down), strict=True):
            like = next(iter(kept.values()))
            install(expert, like.of([next(left) for _ in like.stored]))
        for bias_EO in self._biases():
            bias_EO[expert] = next(left)

    def _biases(self) -> list[Tensor]:
        return [bias_EO for bias_EO in (self._gate_up_bias_EO, self._down_bias_ED) if bias_EO is not None]

    def __call__(self, x_RD: Tensor, routes: Routes) -> Tensor:
        """See Experts."""
        num_rows, top_k = routes.experts_TK.shape
        expert_P, order_P = routes.experts_TK.flatten().sort(stable=True)
        counts = torch.bincount(expert_P - NOWHERE, minlength=1 - NOWHERE).tolist()
        order_P = order_P[counts[0] :]
        used = [(expert, count) for expert, count in enumerate(counts[1:]) if count]
        if not used:
            return torch.zeros_like(x_RD)
        gate_PG, up_PG = _grouped(self._gate_up, self._gate_up_bias_EO, used, x_RD[order_P // top_k]).chunk(2, -1)
        out_PD = _grouped(self._down, self._down_bias_ED, used, _joined(gate_PG, up_PG, self._gate))
        placed_PD = torch.empty_like(out_PD) if not counts[0] else out_PD.new_zeros(num_rows * top_k, self._hidden)
        placed_PD[order_P] = out_PD
        placed_RKD = placed_PD.view(num_rows, top_k, self._hidden).float()
        return torch.bmm(routes.weights_TK[:, None], placed_RKD)[:, 0].to(x_RD.dtype)


def with_room(bias_EO: Tensor, num_slots: int) -> Tensor:
    """The same, with rows for experts that come later."""
    missing = num_slots - len(bias_EO)
    return F.pad(bias_EO, (0, 0, 0, missing)) if missing else bias_EO


def _joined(gate_PG: Tensor, up_PG: Tensor, kind: Gate) -> Tensor:
    """See Gate; both may be overwritten."""
    if kind != "swigluoai":
        return activate(gate_PG, kind).mul_(up_PG)
    gate_PG = gate_PG.clamp_(max=7.0)
    return gate_PG.mul_(torch.sigmoid(1.702 * gate_PG)).mul_(up_PG.clamp_(-7.0, 7.0).add_(1.0))


def _grouped(
    kernels: list[LinearKernel | None], bias_EO: Tensor | None, used: list[tuple[int, int]], x_PI: Tensor
) -> Tensor:
    """Each expert's product with its rows, which lie in the order of `used`: expert and number of rows."""
    parts = x_PI.split_with_sizes([count for _, count in used])
    out = []
    for (expert, _), part_RI in zip(used, parts, strict=True):
        kernel = kernels[expert]
        assert kernel is not None, "the loader fills every expert"
        out.append(kernel.linear(part_RI, None if bias_EO is None else bias_EO[expert]))
    return torch.cat(out)
