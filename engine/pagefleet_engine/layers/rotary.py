"""From projected heads to attention: normalise and rotate queries and keys, put keys and values into their pages.

The angles of a step's tokens are worked out once for all layers that rotate alike. The first half of a head's rotated
dimensions turns against the second half. Shapes: T tokens, N query heads, K key heads, M = N + K, L = N + 2K, H head
size, R rotated dimensions, P positions. Of latents: W width of what is kept of a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from pagefleet_kernels.heads import prepare_heads
from pagefleet_kernels.latents import prepare_latents
from pagefleet_kernels.native.attention import MAX_HEAD_DIM
from pagefleet_kernels.native.layers import rotate_heads
from torch import Tensor

from pagefleet_engine.attention.backend import AttentionSpec, AttentionStep
from pagefleet_engine.layers.norm import HeadNorm, RMSNorm
from pagefleet_engine.layers.rotary_frequencies import RopeParameters, angles_of, query_scales
from pagefleet_engine.layers.weight import Placement


@dataclass(slots=True, eq=False)
class Heads:
    """One layer's heads, how they are normalised, and how they attend."""

    num_heads: int
    num_kv_heads: int
    """0: the layer reads keys and values of another."""
    norm: HeadNorm | None
    spec: AttentionSpec
    interleaved: bool = False
    """See LatentHeads."""

    def scale_cache(self, k_scale: float, v_scale: float) -> None:
        """Take the scales of a KV cache in 8 bits, which arrive with the weights.

        Keys that are kept without the weights of their norm are not those that `k_scale` was measured with; as their
        mean square is one, they need none.
        """
        if self.norm is not None and self.norm.query_factors_H is not None:
            k_scale = 1.0
        self.spec = replace(self.spec, k_scale=k_scale, v_scale=v_scale)


@dataclass(slots=True, eq=False)
class LatentHeads:
    """One layer's heads over latents: the last R of a query and of what is kept of a token rotate."""

    norm: RMSNorm
    """Of the latent."""
    interleaved: bool
    """Neighbours rotate against each other, not one half against the other."""
    spec: AttentionSpec


class Rotation(Protocol):
    """The rotation of one step's tokens."""

    @property
    def num_tokens(self) -> int:
        """T."""
        ...

    def prepare(self, heads: Heads, qkv_TLH: Tensor, step: AttentionStep) -> Tensor:
        """Queries come first in `qkv`, then keys, then values. Writes the last two to the layer's pages; returns the
        queries, [T, N, H]. `qkv` must not be read afterwards."""
        ...

    def prepare_latents(self, heads: LatentHeads, q_TNH: Tensor, kept_TW: Tensor, step: AttentionStep) -> Tensor:
        """Normalise the latents, rotate what follows them, and write both to the layer's pages; returns the queries,
        rotated, [T, N, H]. Neither argument must be read afterwards."""
        ...


class RotaryEmbedding:
    """Makes a step's rotation: from a table for the kernel, computed for the step without."""

    __slots__ = ("_angles", "_head_dim", "_placement", "_rope", "_table_PR")

    def __init__(self, rope: RopeParameters, head_dim: int, max_positions: int, placement: Placement) -> None:
        """`max_positions`: length of the table; without kernels positions have no bound."""
        self._rope, self._head_dim, self._placement = rope, head_dim, placement
        self._angles = angles_of(rope, rope.rotary_dim(head_dim), placement.device)
        self._table_PR: Tensor | None = None
        if placement.use_kernels and rope.rope_type == "none":
            still_2h = torch.tensor([[1.0], [0.0]], device=placement.device).expand(2, head_dim // 2)
            self._table_PR = still_2h.reshape(1, head_dim).expand(max_positions, head_dim)  # one row in memory
        elif placement.use_kernels:
            turns = self._angles(torch.arange(max_positions, device=placement.device))
            self._table_PR = torch.cat((turns.cos(), turns.sin()), dim=-1) * rope.magnitude

    def at(self, positions_T: Tensor) -> Rotation:
        """The rotation to integer positions [T]."""
        by_kernel = None if self._table_PR is None else _KernelRotation(self._table_PR, positions_T)
        if self._rope.rope_type == "none":
            scales_T = query_scales(self._rope, positions_T) if self._rope.query_growth else None
            return _NoRotation(len(positions_T), scales_T, by_kernel)
        if by_kernel is not None:
            return by_kernel
        turns = self._angles(positions_T)
        cos, sin = turns.cos(), turns.sin()
        if self._placement.native_layers is not None and self._head_dim <= MAX_HEAD_DIM:
            return _NativeRotation(self._placement, torch.cat((cos, sin), dim=-1).mul_(self._rope.magnitude))
        return _torch_rotation(cos * self._rope.magnitude, sin * self._rope.magnitude, self._placement.dtype)


def _torch_rotation(cos_TR: Tensor, sin_TR: Tensor, dtype: torch.dtype) -> _TorchRotation:
    """By the angles' cosines and sines, float32 [T, R / 2]."""
    cos_sin = torch.cat((cos_TR, cos_TR, -sin_TR, sin_TR), dim=-1)
    cos_T1R, sin_T1R = cos_sin.to(dtype).unsqueeze(1).chunk(2, dim=-1)
    return _TorchRotation(cos_T1R, sin_T1R)


class _TorchRotation:
    """`x * cos + swapped(x) * sin`, where swapping a head's halves is a roll and the signs are in the sines."""

    __slots__ = ("_cos_T1R", "_half", "_rotary_dim", "_sin_T1R", "num_tokens")

    def __init__(self, cos_T1R: Tensor, sin_T1R: Tensor) -> None:
        self._cos_T1R, self._sin_T1R = cos_T1R, sin_T1R
        self.num_tokens, self._rotary_dim = cos_T1R.shape[0], cos_T1R.shape[-1]
        self._half = self._rotary_dim // 2

    def prepare(self, heads: Heads, qkv_TLH: Tensor, step: AttentionStep) -> Tensor:
        """See Rotation."""
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        qk_TMH, v_TKH = qkv_TLH.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), 1)
        if heads.norm is not None:
            qk_TMH = heads.norm(qk_TMH)
        q_TNH, k_TKH = self._turn(qk_TMH, heads.interleaved).split_with_sizes((num_heads, num_kv_heads), 1)
        if num_kv_heads:
            step.write(heads.spec, k_TKH, v_TKH)
        return q_TNH

    def prepare_latents(self, heads: LatentHeads, q_TNH: Tensor, kept_TW: Tensor, step: AttentionStep) -> Tensor:
        """See Rotation."""
        rank = kept_TW.shape[1] - self._rotary_dim
        kept_T1R = self._turn(kept_TW[:, None, rank:], heads.interleaved)
        step.write(heads.spec, torch.cat((heads.norm(kept_TW[:, :rank])[:, None], kept_T1R), dim=-1), None)
        rope_TNR = q_TNH[..., -self._rotary_dim :]
        rope_TNR.copy_(self._turn(rope_TNR, heads.interleaved))
        return q_TNH

    def _turn(self, qk_TMH: Tensor, interleaved: bool) -> Tensor:
        if self._rotary_dim < qk_TMH.shape[-1]:
            turned_TMR = self._turn(qk_TMH[..., : self._rotary_dim], interleaved)
            return torch.cat((turned_TMR, qk_TMH[..., self._rotary_dim :]), dim=-1)
        if interleaved:
            halves_TMR = self._turn(qk_TMH.reshape(*qk_TMH.shape[:-1], self._half, 2).mT.flatten(-2), interleaved=False)
            return halves_TMR.view(*qk_TMH.shape[:-1], 2, self._half).mT.flatten(-2)
        swapped_TMH = qk_TMH.roll(self._half, -1)
        return torch.addcmul(qk_TMH * self._cos_T1R, swapped_TMH, self._sin_T1R)


class _NativeRotation:
    """Heads are normalised and rotated in one pass, in place."""

    __slots__ = ("_cos_sin_TR", "_placement", "num_tokens")

    def __init__(self, placement: Placement, cos_sin_TR: Tensor) -> None:
        self._placement, self._cos_sin_TR = placement, cos_sin_TR
        self.num_tokens = cos_sin_TR.shape[0]

    def prepare(self, heads: Heads, qkv_TLH: Tensor, step: AttentionStep) -> Tensor:
        """See Rotation."""
        library, norm = self._placement.native_layers, heads.norm
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        assert library is not None, "it is made by a placement with compiled kernels"
        rotate_heads(
            library,
            qkv_TLH[:, : num_heads + num_kv_heads],
            num_heads,
            self._cos_sin_TR,
            norms_2H=None if norm is None else norm.factors_2H,
            eps=0.0 if norm is None else norm.eps,
            interleaved=heads.interleaved,
        )
        q_TNH, k_TKH, v_TKH = qkv_TLH.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
        if num_kv_heads:
            step.write(heads.spec, k_TKH, v_TKH)
        return q_TNH

    def prepare_latents(self, heads: LatentHeads, q_TNH: Tensor, kept_TW: Tensor, step: AttentionStep) -> Tensor:
        """See Rotation."""
        cos_TR, sin_TR = self._cos_sin_TR.chunk(2, dim=-1)
        by_torch = _torch_rotation(cos_TR, sin_TR, self._placement.dtype)
        return by_torch.prepare_latents(heads, q_TNH, kept_TW, step)


class _NoRotation:
    """Heads stay where they are; queries may grow with their positions."""

    __slots__ = ("_normed", "_scales_T11", "num_tokens")

    def __init__(self, num_tokens: int, scales_T: Tensor | None, normed: Rotation | None) -> None:
        """`normed`: by angles of zero, for heads that are normalised; None: torch does it."""
        self.num_tokens, self._normed = num_tokens, normed
        self._scales_T11 = None if scales_T is None else scales_T[:, None, None]

    def prepare(self, heads: Heads, qkv_TLH: Tensor, step: AttentionStep) -> Tensor:
        """See Rotation."""
        if heads.norm is not None and self._normed is not None:
            q_TNH = self._normed.prepare(heads, qkv_TLH, step)
        else:
            q_TNH = self._written(heads, qkv_TLH, step)
        return q_TNH if self._scales_T11 is None else q_TNH.mul_(self._scales_T11)

    def _written(self, heads: Heads, qkv_TLH: Tensor, step: AttentionStep) -> Tensor:
        """The queries; keys and values are in their pages."""
        num_heads, num_kv_heads = heads.num_heads, heads.num_kv_heads
        qk_TMH, v_TKH = qkv_TLH.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), 1)
        if heads.norm is not None:
            qk_TMH = heads.norm(qk_TMH)
        q_TNH, k_TKH = qk_TMH.split_with_sizes((num_heads, num_kv_heads), 1)
        step.write(heads.spec, k_TKH, v_TKH)
        return q_TNH

    def prepare_latents(self, heads: LatentHeads, q_TNH: Tensor, kept_TW: Tensor, step: AttentionStep) -> Tensor:
        """There are no such models."""
        raise AssertionError("latents come with a part that rotates")


class _KernelRotation:
    """One kernel does it all; it reads the table at the positions."""

    __slots__ = ("_positions_T", "_table_PR", "num_tokens")

    def __init__(self, table_PR: Tensor, positions_T: Tensor) -> None:
        self._table_PR, self._positions_T = table_PR, positions_T
        self.num_tokens = positions_T.shape[0]

    def prepare(self, heads: Heads, qkv_TLH: Tensor, step: AttentionStep) -> Tensor:
        """See Rotation."""
        spec, norm, pages = heads.spec, heads.norm, step.pages(heads.spec)
        return prepare_heads(
            qkv_TLH,
            heads.num_heads,
            heads.num_kv_heads,
            self._table_PR,
            self._positions_T,
            pages.kv_cache,
            pages.slot_mapping_T,
            q_norm_H=None if norm is None else norm.weights_H["q_norm"],
            k_norm_H=None if norm is None else norm.weights_H.get("k_norm", norm.weights_H["q_norm"]),
            eps=0.0 if norm is None else norm.eps,
            unit_offset=norm is not None and norm.unit_offset,
            interleaved=heads.interleaved,
            k_scale=spec.k_scale,
            v_scale=spec.v_scale,
        )

    def prepare_latents(self, heads: LatentHeads, q_TNH: Tensor, kept_TW: Tensor, step: AttentionStep) -> Tensor:
        """See Rotation."""
        pages, norm = step.pages(heads.spec), heads.norm
        return prepare_latents(
            q_TNH,
            kept_TW,
            norm.weight_D,
            self._table_PR,
            self._positions_T,
            pages.kv_cache[:, 0, 0],
            pages.slot_mapping_T,
            eps=norm.eps,
            interleaved=heads.interleaved,
            scale=heads.spec.k_scale,
        )
