"""GGUF's types of numbers: blocks of a row, and what matrices in them become on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufKind:
    """A type of a tensor; plain numbers are blocks of one."""

    name: str
    numbers: int
    """Of a block."""
    num_bytes: int
    """Of a block."""
    bits: int = 0
    """That a CPU keeps a matrix's numbers in; 0: they are plain."""
    group: int = 1
    """Numbers that share a scale."""
    has_offsets: bool = False
    """Groups have an offset beside their scale."""
    shares_scales: bool = False
    """Groups have scales of 8 bits on a CPU, beside one of 16 for the block; else theirs are of 16."""
    on_gpu: bool = False
    """Kernels of a GPU take such matrices; else they become floats. Kernels take no offsets, and groups of 16 in codes
    alone; MXFP4 is left to them in safetensors, as in GGUF it is that of gpt-oss, whose experts have biases."""

    @property
    def gpu_bits(self) -> int:
        """That numbers take where no compiled kernel of a CPU lays them out."""
        return 4 if self.bits == 4 else 8

    @property
    def cpu_bytes(self) -> int:
        """Of a matrix's block on a CPU."""
        groups = self.numbers // self.group
        scales = groups + 2 if self.shares_scales else 2 * groups
        return self.numbers * self.bits // 8 + (2 if self.has_offsets else 1) * scales

    @property
    def gpu_bytes(self) -> int:
        """Of a matrix's block on a GPU that takes it, with scales of 32 bits."""
        return self.numbers * self.gpu_bits // 8 + 4 * self.numbers // self.group


KINDS: Mapping[int, GgufKind] = {
    0: GgufKind("F32", 1, 4),
    1: GgufKind("F16", 1, 2),
    2: GgufKind("Q4_0", 32, 18, 4, 32, on_gpu=True),
    3: GgufKind("Q4_1", 32, 20, 4, 32, has_offsets=True),
    6: GgufKind("Q5_0", 32, 22, 8, 32, on_gpu=True),
    7: GgufKind("Q5_1", 32, 24, 8, 32, has_offsets=True),
    8: GgufKind("Q8_0", 32, 34, 8, 32, on_gpu=True),
    10: GgufKind("Q2_K", 256, 84, 4, 16, has_offsets=True),
    11: GgufKind("Q3_K", 256, 110, 4, 16),
    12: GgufKind("Q4_K", 256, 144, 4, 32, has_offsets=True, shares_scales=True),
    13: GgufKind("Q5_K", 256, 176, 6, 32, has_offsets=True, shares_scales=True),
    14: GgufKind("Q6_K", 256, 210, 6, 16, shares_scales=True),
    16: GgufKind("IQ2_XXS", 256, 66, 4, 32, on_gpu=True),
    17: GgufKind("IQ2_XS", 256, 74, 4, 16, on_gpu=True),
    18: GgufKind("IQ3_XXS", 256, 98, 4, 32, on_gpu=True),
    19: GgufKind("IQ1_S", 256, 50, 4, 32, on_gpu=True),
    20: GgufKind("IQ4_NL", 32, 18, 4, 32, on_gpu=True),
    21: GgufKind("IQ3_S", 256, 110, 4, 32, on_gpu=True),
    22: GgufKind("IQ2_S", 256, 82, 4, 16, on_gpu=True),
    23: GgufKind("IQ4_XS", 256, 136, 4, 32, on_gpu=True),
    29: GgufKind("IQ1_M", 256, 56, 4, 16, on_gpu=True),
    30: GgufKind("BF16", 1, 2),
    34: GgufKind("TQ1_0", 256, 54, 4, 256, on_gpu=True),
    35: GgufKind("TQ2_0", 256, 66, 4, 256, on_gpu=True),
    39: GgufKind("MXFP4", 32, 17, 4, 32),
}
"""By the number that a file has for each."""

OTHER_KINDS: Mapping[int, str] = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""That are not read."""
