"""Which linear layers are quantized, and how: decided from names alone, before anything is loaded.

A checkpoint names its layers by exact name, by a regular expression (`re:...`) or by class (`Linear`, which is every
one); layers that it ignores stay as they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import regex
import torch
from pagefleet_protocol.model_config.gguf_types import KINDS

from pagefleet_engine.errors import ModelLoadError

Number = Literal["fp8", "int8", "mxfp4"]
RoundedNumber = Literal["fp8", "int8"]
WeightScales = Literal["tensor", "channel", "block"]
InputScales = Literal["none", "tensor", "token", "group"]

_CLASS = "Linear"
_RUN = 32
_MATCH_S = 0.2
"""Most of a processor's time that a comparison with a name may take: there are expressions that would take hours."""
STORAGE = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "mxfp4": torch.uint8}
"""The torch type of each number format; two numbers of MXFP4 lie in one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """How a layer's inputs become numbers of eight bits: value = (number - zero point) * scale."""

    number: RoundedNumber
    scales: Literal["tensor", "token", "group"]
    """As InputScales."""
    group: int | None = None
    """Inputs that share a scale, with scales `group`."""
    zero_points: bool = False
    """One beside each scale, of int8 alone; else numbers lie around zero."""
    bound: float | None = None
    """Inputs beyond it count as this, and so scales are no larger."""

    def describe(self) -> str:
        """For log lines and errors."""
        scales = {"tensor": "fixed input scale", "token": "inputs per token", "group": "inputs per token and group"}
        return f"{scales[self.scales]}{' with zero points' if self.zero_points else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationScheme:
    """How one linear layer is stored and what happens to its inputs. A scale multiplies: value = stored * scale."""

    number: Number
    """Of weights and of quantized inputs: fp8 is e4m3 (Micikevicius et al., arXiv 2209.05433), int8 symmetric,
    mxfp4 e2m1 with a power of two for 32 of a row (OCP MX 1.0)."""
    weight_scales: WeightScales
    """One per matrix, per output row, or per `block`."""
    input_scales: InputScales
    """none: inputs are not quantized. tensor: one fixed number from the checkpoint. token, group: worked out at run
    time, one per token, or one per token and `block[1]` inputs."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a weight scale, with weight_scales `block`."""
    input_zero_points: bool = False
    """See Rounding, as the next one."""
    input_bound: float | None = None
    scale_name: str = "weight_scale"
    """The checkpoint's name for weight scales."""
    on_load: bool = False
    """The checkpoint holds plain weights, which are quantized while they are loaded."""

    @property
    def storage(self) -> torch.dtype:
        """Type of the stored weights."""
        return STORAGE[self.number]

    @property
    def rounding(self) -> Rounding | None:
        """What happens to inputs; None: nothing."""
        if self.input_scales == "none" or self.number == "mxfp4":
            return None
        group = self.block[1] if self.input_scales == "group" and self.block is not None else None
        return Rounding(
            number=self.number,
            scales=self.input_scales,
            group=group,
            zero_points=self.input_zero_points,
            bound=self.input_bound,
        )

    def describe(self) -> str:
        """For log lines and errors."""
        size = f" {self.block[0]}x{self.block[1]}" if self.block is not None else ""
        inputs = "inputs as they are" if self.rounding is None else self.rounding.describe()
        return f"{self.number} weights per {self.weight_scales}{size}, {inputs}"


Packing = Literal["compressed-tensors", "int-quantized", "awq", "gptq", "gptq_v2", "torchao", "hqq"]

_WORD_BITS = 32
LOOSE_BITS = 3
"""Numbers of that many bits lie across the words: 32 of them in three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedScheme:
    """How the matrix of a linear layer is stored in numbers of a few bits, several in a word of 32.

    value = (number - zero point) * scale.
    """

    packing: Packing
    """Names and order of the tensors: compressed-tensors `pack-quantized`, or `int-quantized`, with each number in a
    byte, around zero; AWQ `gemm`; GPTQ, whose first version stores zero points less one; torchao and HQQ, as `loader`
    has them, whose zero points are floats."""
    bits: int
    """2, 3, 4 or 8."""
    group_size: int | None
    """Inputs of a row that share a scale and a zero point; None: all."""
    zero_points: bool
    """The checkpoint gives them; else they are the middle of all numbers."""
    act_order: bool = False
    """Which group an input is in is told by a tensor `g_idx`; else groups are of neighbours."""
    inputs: Rounding | None = None
    """What happens to inputs, per token and without zero points; None: they are taken as they are."""
    on_load: ClassVar[bool] = False

    @property
    def word(self) -> int:
        """Numbers that nothing can part: those of a word, or of three."""
        if self.packing == "int-quantized":
            return 1
        return _WORD_BITS if self.bits == LOOSE_BITS else _WORD_BITS // self.bits

    @property
    def float_zeros(self) -> bool:
        """Zero points are no whole numbers, one for each row and group."""
        return self.packing in ("torchao", "hqq")

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that ranks cannot divide."""
        group = 1 if self.act_order or self.group_size is None else self.group_size
        by_columns = 1 if self.packing == "awq" else self.word
        by_rows = self.packing == "compressed-tensors" and not self.zero_points
        rows = 1 if by_rows or self.float_zeros else self.word
        return rows, math.lcm(group, by_columns)

    def describe(self) -> str:
        """For log lines and errors."""
        group = "row" if self.group_size is None else f"group of {self.group_size}"
        order = " in act order" if self.act_order else ""
        zeros = ", zero points" if self.zero_points else ""
        inputs = "" if self.inputs is None else f", {self.inputs.number} {self.inputs.describe()}"
        return f"int{self.bits} weights per {group}{order}{zeros}{inputs} ({self.packing})"


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedScheme:
    """How the matrix of a linear layer is stored in codes of 4 bits: value = what the code stands for * scale, and
    times or over one number for the matrix. Inputs are taken as they are."""

    table: Literal["e2m1", "nf4", "fp4"]
    """What codes stand for: e2m1 (OCP MX 1.0); bitsandbytes' tables."""
    scales: Literal["e4m3", "e8m0", "float32"]
    """Their type; e8m0 are powers of two."""
    group_size: int
    """Inputs of a row that share a scale."""
    spelling: str
    """Of the checkpoint, for messages."""
    codes_name: str = "weight_packed"
    """The checkpoint's names for its tensors."""
    scales_name: str = "weight_scale"
    factor_name: str = ""
    """Of the number for the matrix; empty: there is none."""
    factor_divides: bool = False
    first_is_upper: bool = False
    """Of two codes in a byte."""
    passed_over: str = ""
    """A number for inputs, of no use where these are taken as they are."""
    on_load: ClassVar[bool] = False

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that ranks do not divide: groups, and the runs of inputs that kernels multiply."""
        return 1, max(_RUN, self.group_size)

    def describe(self) -> str:
        """For log lines and errors."""
        return f"{self.table} weights per group of {self.group_size}, inputs as they are ({self.spelling})"


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """Each projection of a linear layer lies in GGUF's blocks of a type."""

    types: tuple[str, ...]
    """By GGUF's names, e.g. Q4_K."""
    on_load: ClassVar[bool] = False

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns that ranks cannot divide."""
        return 1, max(kind.numbers for kind in KINDS.values() if kind.name in self.types)

    def describe(self) -> str:
        """For log lines and errors."""
        return f"{' and '.join(dict.fromkeys(self.types))} (GGUF)"


Scheme = QuantizationScheme | PackedScheme | CodedScheme | BlockScheme


@dataclass(frozen=True, slots=True)
class Rule:
    """A scheme and the layers that have it."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """All of a checkpoint's rules."""

    rules: tuple[Rule, ...]
    """Tried in order; the first that names a layer decides."""
    ignored: tuple[str, ...] = ()
    """Layers that stay as they are, whatever the rules say."""
    kv_scales: bool = False
    """The checkpoint has `k_scale` and `v_scale` for each layer's KV cache."""
    leaves_stacks: bool = False
    """Experts in one tensor are in a float type, whatever the rules say."""

    def scheme(self, names: Sequence[str]) -> Scheme | None:
        """The scheme of a layer that the checkpoint holds under `names`, several where projections are merged.

        Raises:
            ModelLoadError: merged projections have different schemes.
        """
        schemes = [self._scheme_of(name) for name in names]
        in_blocks = [scheme for scheme in schemes if isinstance(scheme, BlockScheme)]
        if in_blocks:  # each may be of another type; beside plain ones all are made plain
            types = tuple(itertools.chain.from_iterable(scheme.types for scheme in in_blocks))
            return BlockScheme(types) if len(in_blocks) == len(schemes) else None
        if any(scheme != schemes[0] for scheme in schemes):
            said = ", ".join(
                f"{name}: {'not quantized' if scheme is None else scheme.describe()}"
                for name, scheme in zip(names, schemes, strict=True)
            )
            raise ModelLoadError(
                f"projections that are computed as one are quantized in different ways ({said}): quantize them alike"
            )
        return schemes[0]

    def _scheme_of(self, name: str) -> Scheme | None:
        if any(matches(pattern, name) for pattern in self.ignored):
            return None
        for rule in self.rules:
            if any(matches(pattern, name) for pattern in rule.targets):
                return rule.scheme
        return None


def matches(pattern: str, name: str) -> bool:
    """Whether a checkpoint's pattern names the layer: its class, its name or that of a part it is in, or `re:...`."""
    if pattern.startswith("re:"):
        try:
            return regex.match(pattern.removeprefix("re:"), name, timeout=_MATCH_S) is not None
        except TimeoutError:
            raise ModelLoadError(
                f"{pattern[:80]!r} takes too long to compare with {name}: repair it, no repeat should be within another"
            ) from None
    return pattern in (_CLASS, name) or name.startswith(pattern + ".")


def on_load(number: RoundedNumber) -> Quantization:
    """What `--quantization` asks for: every linear layer but the head, per output row, inputs per token."""
    scheme = QuantizationScheme(number=number, weight_scales="channel", input_scales="token", on_load=True)
    return Quantization(rules=(Rule((_CLASS,), scheme),), ignored=("lm_head",))
