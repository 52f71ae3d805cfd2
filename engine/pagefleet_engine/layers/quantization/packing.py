"""Numbers of a few bits in words of 32, as compressed-tensors, AutoAWQ and GPTQ store matrices.

| | words | zero points | scales |
|---|---|---|---|
| compressed-tensors | [O, I / w], along inputs | [O / w, G], along outputs | [O, G] |
| the same, `int-quantized` | [O, I], w is 1 | [O, G] | [O, G] |
| torchao and HQQ, by `loader` | [O, I / w], along inputs | float32 [O, G] | [O, G] |
| GPTQ | [I / w, O], along inputs | [G, O / w], along outputs | [G, O] |
| AWQ | [I, O / w], along outputs, which lie crosswise | the same | [G, O] |

Sources: compressed-tensors `pack_quantized`; AutoAWQ's `WQLinear_GEMM` (Lin et al., arXiv 2306.00978); AutoGPTQ's and
GPTQModel's `QuantLinear` (Frantar et al., arXiv 2210.17323). Shapes: I inputs, O outputs, G groups, W words, w numbers
of a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet_engine.layers.quantization_scheme import LOOSE_BITS, PackedScheme
from pagefleet_engine.layers.shard import Shard, shard_of

# Where in a word AWQ has each of eight outputs.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


@dataclass(frozen=True, slots=True)
class Names:
    """What a checkpoint calls the tensors of a matrix."""

    words: str
    scales: str
    zeros: str
    groups: str
    """The group of each input."""


_OF_GPTQ = Names("qweight", "scales", "qzeros", "g_idx")


def names_of(scheme: PackedScheme) -> Names:
    """The names in a scheme's packing."""
    if scheme.packing in ("compressed-tensors", "torchao", "hqq"):
        return Names("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    if scheme.packing == "int-quantized":
        return Names("weight", "weight_scale", "weight_zero_point", "weight_g_idx")
    return _OF_GPTQ


@dataclass(frozen=True, slots=True)
class Unpacked:
    """One matrix, or what a rank has of one."""

    codes_OI: Tensor
    """uint8"""
    scales_OG: Tensor
    """float32"""
    zeros_OG: Tensor | None
    """uint8, or float32 with float_zeros; None: the middle of all numbers."""
    groups_I: Tensor | None
    """int32; None: groups are of neighbours, or the checkpoint names none."""


def tensor_shards(scheme: PackedScheme, inputs: Shard, outputs: Shard) -> dict[str, tuple[Shard, ...]]:
    """What of each stored tensor belongs to these inputs and outputs: rows, and columns unless it is a vector.

    Raises:
        ValueError: words or groups would be cut.
    """
    names = names_of(scheme)
    groups = _groups(scheme, inputs)
    found: dict[str, tuple[Shard, ...]]
    match scheme.packing:
        case "compressed-tensors" | "int-quantized" | "torchao" | "hqq":
            found = {names.words: (outputs, _words(scheme, inputs)), names.scales: (outputs, groups)}
            if scheme.zero_points:
                found[names.zeros] = (outputs if scheme.float_zeros else _words(scheme, outputs), groups)
        case "awq":
            found = {names.words: (inputs, _words(scheme, outputs)), names.scales: (groups, outputs)}
            found[names.zeros] = (groups, _words(scheme, outputs))
        case "gptq" | "gptq_v2":
            found = {names.words: (_words(scheme, inputs), outputs), names.scales: (groups, outputs)}
            found[names.zeros] = (groups, _words(scheme, outputs))
    if scheme.act_order:
        found[names.groups] = (inputs,)
    return found


def read_packed(scheme: PackedScheme, stored: Mapping[str, Tensor], num_inputs: int, num_outputs: int) -> Unpacked:
    """The numbers of one matrix of that size; the tensors are as `tensor_shards` has them."""
    names = names_of(scheme)
    words, scales, zeros = stored[names.words], stored[names.scales], stored.get(names.zeros)
    if scheme.packing == "int-quantized":
        middle = 1 << (scheme.bits - 1)
        zeros_OG = None if zeros is None else (zeros.view(num_outputs, -1).short() + middle).to(torch.uint8)
        codes_OI, scales_OG = (words.short() + middle).to(torch.uint8), scales.view(num_outputs, -1)
    elif scheme.packing == "compressed-tensors" or scheme.float_zeros:
        zeros_OG = zeros
        if zeros is not None and not scheme.float_zeros:
            zeros_OG = unpack(zeros.t(), scheme.bits).t()[:num_outputs]
        codes_OI, scales_OG = unpack(words, scheme.bits)[:, :num_inputs], scales.view(num_outputs, -1)
    else:
        assert zeros is not None, "both have them always"
        zeros_OG = read_zeros(scheme, zeros).t() if scheme.zero_points else None
        in_awq = scheme.packing == "awq"
        codes_OI = in_turns(unpack(words, scheme.bits)).t() if in_awq else unpack(words.t(), scheme.bits)
        scales_OG = scales.t()
    zeros_OG = None if zeros_OG is None else zeros_OG.contiguous()
    return Unpacked(codes_OI[:, :num_inputs], scales_OG.contiguous(), zeros_OG, stored.get(names.groups))


def read_zeros(scheme: PackedScheme, words: Tensor) -> Tensor:
    """uint8 [G, O] of AWQ's or GPTQ's [G, O / w]; in GPTQ's first version up to one more than the largest number."""
    zeros_GO = unpack(words, scheme.bits)
    match scheme.packing:
        case "awq":
            return in_turns(zeros_GO)
        case "gptq":
            return zeros_GO + 1
        case _:
            return zeros_GO


def unpack(words: Tensor, bits: int) -> Tensor:
    """uint8 [..., W * w] of the numbers in int32 [..., W], lowest bits first."""
    mask = (1 << bits) - 1
    if bits != LOOSE_BITS:
        # Flat before: `contiguous` leaves a row's only word its stride, and bytes have to follow each other.
        in_bytes = words.flatten().view(torch.uint8).view(*words.shape[:-1], 4 * words.shape[-1])
        if bits == 8:
            return in_bytes
        return torch.stack([(in_bytes >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)
    triples = words.to(torch.int64).reshape(*words.shape[:-1], -1, bits) & 0xFFFFFFFF
    first = bits * torch.arange(32, device=words.device)
    word, shift = first // 32, first % 32
    upper = triples[..., (word + 1).clamp_(max=bits - 1)] << (32 - shift)
    return ((triples[..., word] >> shift | upper) & mask).to(torch.uint8).flatten(-2)


def in_turns(crosswise: Tensor) -> Tensor:
    """AWQ's numbers [X, O] in the order of the outputs."""
    places = torch.tensor(_AWQ_PLACES, device=crosswise.device)
    return crosswise.view(len(crosswise), -1, len(_AWQ_PLACES))[..., places].flatten(-2)


def _words(scheme: PackedScheme, numbers: Shard) -> Shard:
    runs = numbers.in_blocks_of(scheme.word)
    return runs.times(LOOSE_BITS) if scheme.bits == LOOSE_BITS else runs


def _groups(scheme: PackedScheme, inputs: Shard) -> Shard:
    if scheme.group_size is None:
        return shard_of(1)
    if scheme.act_order:
        return shard_of(inputs.whole // scheme.group_size)
    return inputs.in_blocks_of(scheme.group_size)
