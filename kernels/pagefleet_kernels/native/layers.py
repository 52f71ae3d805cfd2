"""RMSNorm and the rotation of heads on a CPU, each in one pass; computed in float32 and rounded once.

Shapes: T tokens, D normalised width, H head size, R rotated dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagefleet_kernels.errors import UnsupportedShapeError
from pagefleet_kernels.native.attention import DTYPES, MAX_HEAD_DIM
from pagefleet_kernels.native.library import Library, Rotation, Rows

_NUMBERS_PER_THREAD = 1 << 15
"""That one thread goes through sooner than another wakes."""


class NativeNorm:
    """`x / sqrt(mean(x^2) + eps) * w` over the last axis, for x of [T, D], or of [T, M, D] with weights [D] or [M, D].

    The last axis is contiguous. Weights are stored less one where `unit_offset`.
    """

    __slots__ = ("_eps", "_library", "_weight")

    def __init__(self, library: Library, weight: Tensor, eps: float, unit_offset: bool) -> None:
        factor = weight.to(torch.float32, copy=True).contiguous()
        self._library, self._eps = library, eps
        self._weight = factor.add_(1.0) if unit_offset else factor

    def __call__(self, x: Tensor) -> Tensor:
        """A new contiguous tensor of x's shape and dtype."""
        weight = self._weight
        rows = _rows(x, weight.shape[-1] if weight.dim() > 1 else 0)
        if weight.shape[-1] != rows.width or (weight.dim() > 1 and weight.shape[0] != rows.heads):
            raise UnsupportedShapeError(f"x {list(x.shape)} does not fit a weight of {list(weight.shape)}")
        out = torch.empty(x.shape, dtype=x.dtype)
        self._library.norm(rows, x.data_ptr(), out.data_ptr(), weight.data_ptr(), self._eps)
        return out


def rotate_heads(
    library: Library,
    qk_TMH: Tensor,
    num_heads: int,
    cos_sin_TR: Tensor,
    *,
    norms_2H: Tensor | None = None,
    eps: float = 0.0,
    interleaved: bool = False,
) -> None:
    """Normalise each head, where `norms_2H` has weights of queries and of keys, and turn its first R numbers, in place.

    The first `num_heads` of M are queries. The table is float32, contiguous: R/2 cosines, then R/2 sines.
    """
    rows = _rows(qk_TMH, 0)
    rotary_dim = cos_sin_TR.shape[1]
    if rows.width > MAX_HEAD_DIM or rotary_dim > rows.width or cos_sin_TR.shape[0] != rows.tokens:
        raise UnsupportedShapeError(f"heads {list(qk_TMH.shape)} do not fit angles of {list(cos_sin_TR.shape)}")
    q_norm = None if norms_2H is None else norms_2H.data_ptr()
    k_norm = None if norms_2H is None else norms_2H[-1].data_ptr()
    how = Rotation(cos_sin_TR.data_ptr(), q_norm, k_norm, eps, num_heads, rotary_dim, interleaved)
    library.rotate(rows, qk_TMH.data_ptr(), how)


def _rows(x: Tensor, weight_stride: int) -> Rows:
    if x.dtype not in DTYPES or x.stride(-1) != 1:
        raise UnsupportedShapeError(f"{x.dtype} with strides {x.stride()} is not for these kernels")
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    threads = min(torch.get_num_threads(), 1 + x.numel() // _NUMBERS_PER_THREAD)
    is_bf16 = x.dtype == torch.bfloat16
    return Rows(x.stride(0), head_stride, x.shape[0], heads, x.shape[-1], weight_stride, is_bf16, threads)
