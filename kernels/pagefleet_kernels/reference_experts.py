"""The torch twins of `experts`: an expert at a time, over the rows that are its own. Shapes as there."""

from __future__ import annotations

import torch

from pagefleet_kernels import reference
from pagefleet_kernels.coded_matmul import CodedWeights
from pagefleet_kernels.mxfp4 import dequantize_mxfp4
from pagefleet_kernels.packed_matmul import PackedWeights


def align_experts(
    experts_RK: torch.Tensor, num_experts: int, block_m: int, num_blocks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `expert_blocks.align_experts`: pairs and experts of the blocks."""
    found_P, pair_P = experts_RK.flatten().sort(stable=True)
    pair_P, found_P = pair_P[found_P >= 0], found_P[found_P >= 0].long()
    counts_E = torch.bincount(found_P, minlength=num_experts)
    held_E = (counts_E + block_m - 1) // block_m
    experts_B = torch.full((num_blocks,), -1, dtype=torch.int32, device=experts_RK.device)
    owners = torch.arange(num_experts, device=experts_RK.device).repeat_interleave(held_E)
    experts_B[: len(owners)] = owners.to(torch.int32)
    pairs_BM = torch.full((num_blocks, block_m), experts_RK.numel(), dtype=torch.int32, device=experts_RK.device)
    # Where an expert's first pair goes, less where it stands among the sorted ones.
    shift_E = (held_E.cumsum(0) - held_E) * block_m - (counts_E.cumsum(0) - counts_E)
    place_P = torch.arange(len(pair_P), device=experts_RK.device) + shift_E[found_P]
    pairs_BM.view(-1)[place_P] = pair_P.to(torch.int32)
    return pairs_BM, experts_B


def grouped_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    values_EOI: torch.Tensor,
    scales: torch.Tensor | None,
    block: int | None,
    bias_EO: torch.Tensor | None,
    pairs_BM: torch.Tensor,
    experts_B: torch.Tensor,
    out_dtype: torch.dtype,
    num_pairs: int,
    top_k: int,
    gate: str | None,
    shift: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Twin of `experts.grouped_matmul`; pairs in no block are zero."""
    num_rows = values_EOI.shape[1]
    out_PO = x.new_zeros((num_pairs, num_rows if gate is None else num_rows // 2), dtype=out_dtype)
    for expert in sorted(set(experts_B.tolist())):
        if expert < 0:
            continue
        pair_N = pairs_BM[experts_B == expert].flatten()
        pair_N = pair_N[pair_N < num_pairs].long()
        row_N = pair_N // top_k
        scale = None if x_scale is None else _of_rows(x_scale, row_N)
        if values_EOI.dtype == torch.uint8:
            assert scales is not None, "MXFP4 has scales"
            product = x[row_N].float() @ dequantize_mxfp4(values_EOI[expert], scales[expert]).t()
        elif scales is None:
            product = x[row_N].float() @ values_EOI[expert].float().t()
        else:
            own = scales[expert] if block is not None else scales[expert][None]
            wide = scale if scale is None or block is not None else scale.reshape(-1, 1)
            shifted = None if shift is None else (_of_rows(shift[0], row_N), shift[1][expert])
            product = reference.scaled_matmul(
                x[row_N], wide, values_EOI[expert], own, None, torch.float32, block, shifted
            )
        if bias_EO is not None:
            product += bias_EO[expert].float()
        out_PO[pair_N] = (product if gate is None else _joined(product, gate)).to(out_dtype)
    return out_PO


def _of_rows(each: torch.Tensor, row_N: torch.Tensor) -> torch.Tensor:
    """Of these rows, unless one is that of all."""
    return each if each.numel() == 1 else each[row_N]


def grouped_few_bits_matmul(
    x_RI: torch.Tensor,
    x_scale: torch.Tensor | None,
    weights: PackedWeights | CodedWeights,
    num_rows: int,
    pairs_BM: torch.Tensor,
    experts_B: torch.Tensor,
    out_PO: torch.Tensor,
    top_k: int,
    gate: str | None,
) -> torch.Tensor:
    """Twin of `packed_experts.grouped_packed_matmul` and `coded_experts.grouped_coded_matmul`; fills and returns
    `out_PO`. `num_rows`: of each expert."""
    for expert in sorted(set(experts_B.tolist()) - {-1}):
        pair_N = pairs_BM[experts_B == expert].flatten()
        pair_N = pair_N[pair_N < len(out_PO)].long()
        matrix_OI = weights.rows(expert * num_rows, (expert + 1) * num_rows).dequantize()
        product = x_RI[pair_N // top_k].float() @ matrix_OI.t()
        if x_scale is not None:
            product *= x_scale[pair_N // top_k]
        out_PO[pair_N] = (product if gate is None else _joined(product, gate)).to(out_PO.dtype)
    return out_PO


def order_inputs(
    x_RI: torch.Tensor, order_EI: torch.Tensor, experts_RK: torch.Tensor, out_PI: torch.Tensor
) -> torch.Tensor:
    """Twin of `packed_experts.order_inputs`; fills and returns `out_PI`."""
    for expert in sorted(set(experts_RK.flatten().tolist())):
        if expert >= 0:
            pair_N = (experts_RK.flatten() == expert).nonzero().flatten()
            out_PI[pair_N] = x_RI[pair_N // experts_RK.shape[1]][:, order_EI[expert].long()]
    return out_PI


def _joined(gate_up_NO: torch.Tensor, kind: str) -> torch.Tensor:
    """Twin of `experts._joined`."""
    if kind != "swigluoai":
        return reference.gated_activation(gate_up_NO, kind)
    gate_NG, up_NG = gate_up_NO.chunk(2, -1)
    gate_NG = gate_NG.clamp(max=7.0)
    return gate_NG * torch.sigmoid(1.702 * gate_NG) * (up_NG.clamp(-7.0, 7.0) + 1.0)


def combine_experts(y_PD: torch.Tensor, weights_RK: torch.Tensor, experts_RK: torch.Tensor) -> torch.Tensor:
    """Twin of `experts.combine_experts`."""
    num_rows, top_k = weights_RK.shape
    found_RK1 = (experts_RK >= 0)[..., None]
    y_RKD = y_PD.view(num_rows, top_k, y_PD.shape[1]).float().masked_fill(~found_RK1, 0.0)
    return (y_RKD * weights_RK[..., None].masked_fill(~found_RK1, 0.0)).sum(1).to(y_PD.dtype)
