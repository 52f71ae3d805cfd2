"""AWQ (Lin et al., arXiv 2306.00978): inputs that are large get larger weights, which lose less when they are rounded;
what stands before the layer gives these inputs smaller by as much.

    y = W x = (W diag(s)) (diag(1/s) x)

Two things are ours. The error that scales are chosen by is that of the products that share them, not of the block that
they are in: so no forward pass is needed for a candidate. And query heads that share a value head share its scales.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet_engine.compression.grid import Grid, round_to_nearest
from pagefleet_engine.compression.inputs import Sample
from pagefleet_engine.models.arch import ModelArch

_CANDIDATES = 20
_SMALLEST = 1e-4
_ATTENTION = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.qkv_proj",))
_MLP = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.gate_up_proj",), ("mlp.fc1",))
"""What reads a norm, in one spelling or another."""
_PRODUCTS = (("up_proj", "down_proj"), ("w3", "w2"))
"""What is multiplied by a gate, and what reads the product."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Matrices that share scales, and what gives their inputs."""

    source: str
    """A norm, or a matrix whose outputs the inputs are in proportion to."""
    readers: tuple[str, ...]
    heads: tuple[int, int] | None = None
    """Of values before attention and after it; their outputs are `heads[1] / heads[0]` times as many."""


def folds_of(layer: str, tensors: Mapping[str, Tensor], quantized: frozenset[str], arch: ModelArch) -> list[Fold]:
    """Where scales of a layer can go; `tensors` are the layer's, by name. Whether it computes the same after that is up
    to the caller to see."""

    def has(*names: str) -> bool:
        return all(f"{name}.weight" in tensors for name in names)

    def readers(kinds: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
        named = [tuple(f"{layer}.{end}" for end in ends) for ends in kinds]
        return next((names for names in named if has(*names) and quantized.issuperset(names)), ())

    found: list[Fold] = []
    if has(before := f"{layer}.input_layernorm"):
        norms = (f"{layer}.pre_feedforward_layernorm", f"{layer}.post_attention_layernorm")
        second = next((norm for norm in norms if has(norm)), None)
        if second is None:  # attention and MLP stand side by side
            found.append(Fold(before, readers(_ATTENTION) + readers(_MLP)))
        else:
            found += [Fold(before, readers(_ATTENTION)), Fold(second, readers(_MLP))]
    values, output = f"{layer}.self_attn.v_proj", f"{layer}.self_attn.o_proj"
    if has(values, output) and output in quantized and arch.clip_qkv is None:
        rows, columns = len(tensors[f"{values}.weight"]), tensors[f"{output}.weight"].shape[1]
        if rows == arch.num_kv_heads * arch.head_dim and columns == arch.num_heads * arch.head_dim:
            found.append(Fold(values, (output,), (arch.num_kv_heads, arch.num_heads)))
    for name in sorted(quantized):
        parent, _, end = name.rpartition(".")
        for source, reader in _PRODUCTS:
            if end == reader and arch.mlp_gate and has(f"{parent}.{source}"):
                found.append(Fold(f"{parent}.{source}", (name,)))
    return [fold for fold in found if fold.readers]


def find_scales(fold: Fold, tensors: Mapping[str, Tensor], sample: Sample, grid: Grid, size: int | None) -> Tensor:
    """The scales [I] under which the readers' products lose least; none are searched for in vain: 1 is a candidate."""
    means_I = sample.mean_sizes().clamp(min=_SMALLEST)
    if fold.heads is not None:
        kv_heads, heads = fold.heads
        means = means_I.view(kv_heads, heads // kv_heads, -1)
        means_I = means.mean(1, keepdim=True).expand_as(means).reshape(-1)
    weights = [tensors[f"{reader}.weight"].float() for reader in fold.readers]
    best = torch.ones_like(means_I)
    least = torch.inf
    for step in range(_CANDIDATES):
        scales_I = means_I ** (step / _CANDIDATES)
        scales_I = scales_I / (scales_I.max() * scales_I.min()).sqrt()
        lost = sum(
            sample.square_of(round_to_nearest(weight_OI * scales_I, grid, size).weight() / scales_I - weight_OI)
            for weight_OI in weights
        )
        if lost < least:
            best, least = scales_I, lost
    return best


def folded(fold: Fold, scales_I: Tensor, tensors: Mapping[str, Tensor], unit_offset: bool) -> dict[str, Tensor]:
    """The tensors that the scales change, in their own types. `unit_offset`: norms store their weights less one."""
    changed = {
        f"{reader}.weight": _like(tensors[f"{reader}.weight"], tensors[f"{reader}.weight"].float() * scales_I)
        for reader in fold.readers
    }
    weight = tensors[f"{fold.source}.weight"]
    before = scales_I
    if fold.heads is not None:
        kv_heads, heads = fold.heads
        before = scales_I.view(kv_heads, heads // kv_heads, -1)[:, 0].reshape(-1)
    if weight.dim() == 2:
        smaller = weight.float() / before[:, None]
    else:
        smaller = (weight.float() + 1.0) / before - 1.0 if unit_offset else weight.float() / before
    changed[f"{fold.source}.weight"] = _like(weight, smaller)
    bias = tensors.get(f"{fold.source}.bias")
    if bias is not None:
        changed[f"{fold.source}.bias"] = _like(bias, bias.float() / before)
    return changed


def _like(old: Tensor, new: Tensor) -> Tensor:
    return new.to(old.dtype)
