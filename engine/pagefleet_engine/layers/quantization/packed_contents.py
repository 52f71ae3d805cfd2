"""What the tensors of a matrix in numbers of a few bits may hold, and what of them stays in memory."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from pagefleet_engine.layers.quantization.form import Form
from pagefleet_engine.layers.quantization.packing import names_of, unpack
from pagefleet_engine.layers.quantization_scheme import LOOSE_BITS, PackedScheme
from pagefleet_engine.layers.shard import Shard
from pagefleet_engine.layers.weight import Content, Kept, UnusableTensorError

# Of random weights.
_STANDARD_DEVIATION = 0.02


def packed_kept(scheme: PackedScheme, form: Form, dtype: torch.dtype) -> dict[str, Kept]:
    """What each tensor of a model of `dtype` becomes, by name."""
    loose = scheme.packing == "int-quantized"
    names, in_word = names_of(scheme), Fraction(1) if loose else Fraction(32, scheme.bits)
    one, half = Kept(torch.uint8, numbers=in_word), Kept(torch.uint8, numbers=in_word / 2)
    nothing, order = Kept(dtype, numbers=0), Kept(torch.int32)
    if form is Form.EXPANDED:
        kept = (Kept(dtype, numbers=in_word), nothing, nothing, nothing)
    else:
        scales = torch.float16 if form is Form.NATIVE else torch.float32
        zeros = Kept(scales) if scheme.float_zeros else one
        kept = (one if scheme.bits == 8 else half, Kept(scales), zeros if scheme.zero_points else nothing, order)
    return dict(zip((names.words, names.scales, names.zeros, names.groups), kept, strict=True))


def packed_bytes(scheme: PackedScheme) -> float:
    """Of one number of a matrix, with its share of a scale and a zero point, as kernels read them."""
    zero = 4 if scheme.float_zeros else int(scheme.zero_points)
    shared = 0 if scheme.group_size is None else (4 + zero) / scheme.group_size
    return (1.0 if scheme.bits == 8 else 0.5) + shared


def packed_contents(scheme: PackedScheme, inputs: Shard) -> dict[str, Content]:
    """What each tensor may hold whose numbers are not any, by name; a rank has these inputs."""
    names = names_of(scheme)
    middle, less = 1 << (scheme.bits - 1), int(scheme.packing == "gptq")
    deviation = (1 << scheme.bits) / 12**0.5
    found = {
        names.scales: Content(_check_finite, lambda shape: torch.full(shape, _STANDARD_DEVIATION / deviation)),
        names.zeros: Content(
            lambda words: _check_zeros(scheme, words), lambda shape: _words_of(middle - less, scheme.bits, shape)
        ),
    }
    if scheme.float_zeros:
        found[names.zeros] = Content(_check_finite, lambda shape: torch.full(shape, float(middle)))
    if scheme.packing == "int-quantized":
        found[names.zeros] = Content(
            lambda zeros: _check_numbers(zeros, scheme.bits), lambda shape: torch.zeros(shape, dtype=torch.int8)
        )
        found[names.words] = Content(
            lambda numbers: _check_numbers(numbers, scheme.bits), lambda shape: _at_random(shape, scheme.bits)
        )
    if scheme.group_size is not None:
        size = scheme.group_size
        found[names.groups] = Content(
            lambda groups: _check_groups(groups, inputs, size),
            lambda shape: torch.arange(shape[0], dtype=torch.int32) // size,
        )
    return found


def _check_finite(numbers: Tensor) -> None:
    if not bool(numbers.isfinite().all()):
        raise UnusableTensorError("holds a number that is not finite: download the checkpoint again")


def _check_numbers(numbers: Tensor, bits: int) -> None:
    least, most = (int(end) for end in numbers.aminmax())
    if least < -1 << (bits - 1) or most >= 1 << (bits - 1):
        raise UnusableTensorError(
            f"holds numbers from {least} to {most}, which are not of {bits} bits: give num_bits in config.json as the "
            "weights were quantized with"
        )


def _at_random(shape: tuple[int, ...], bits: int) -> Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape))
    return torch.randint(-1 << (bits - 1), 1 << (bits - 1), shape, dtype=torch.int8, generator=generator)


def _check_zeros(scheme: PackedScheme, words: Tensor) -> None:
    if not scheme.packing.startswith("gptq"):
        return
    stored, numbers, less = unpack(words, scheme.bits), 1 << scheme.bits, int(scheme.packing == "gptq")
    if bool((stored == numbers - less).any()):
        raise UnusableTensorError(
            f"holds a zero point of {numbers}, and {numbers - 1} is the largest: download the checkpoint again, or "
            "give checkpoint_format gptq_v2 in config.json where zero points are stored as they are"
        )
    if not scheme.zero_points and bool((stored != numbers // 2 - less).any()):
        raise UnusableTensorError(
            f"holds zero points other than {numbers // 2}, which config.json's sym means: give sym false there, or "
            "checkpoint_format gptq_v2 where zero points are stored as they are"
        )


def _check_groups(groups: Tensor, inputs: Shard, size: int) -> None:
    count, least, most = inputs.whole // size, int(groups.min()), int(groups.max())
    if least == most == -1:  # compressed-tensors' way to say that there is no order
        return
    if least < 0 or most >= count:
        raise UnusableTensorError(
            f"puts inputs into groups {least} to {most}, there are 0 to {count - 1}: give group_size in config.json as "
            "the weights were quantized with, or download the checkpoint again"
        )
    if not inputs.is_part:
        sizes = torch.bincount(groups, minlength=count)
        if bool((sizes != size).any()):
            raise UnusableTensorError(
                f"makes groups of {int(sizes.min())} to {int(sizes.max())} inputs, and group_size is {size}: download "
                "the checkpoint again"
            )


def _words_of(number: int, bits: int, shape: tuple[int, ...]) -> Tensor:
    """int32 words that hold nothing but that number."""
    words = LOOSE_BITS if bits == LOOSE_BITS else 1
    stream = sum(number << at for at in range(0, 32 * words, bits)).to_bytes(4 * words, "little")
    run = torch.frombuffer(bytearray(stream), dtype=torch.int32)
    return run.repeat(*shape[:-1], shape[-1] // words) if words > 1 else run.expand(shape)
