"""Few lengths instead of all: the CPU's matrix kernels are compiled for each shape that they meet, and kept.

In 16-bit types a new shape takes oneDNN some milliseconds and most of a megabyte, often more than the product itself,
and as contexts grow there would be one in nearly every step. float32 goes to another library, and stays exact. Rows and
queries stay exact, too: rounding them up cost as much as it saved (measured: half the shapes, no more tokens).
"""

from __future__ import annotations

import torch

STEPS = 8
"""Lengths between one power of two and the next. At most an eighth of a context is gathered for nothing."""


def are_compiled(dtype: torch.dtype) -> bool:
    """Whether products of this type take kernels that are compiled for their shape."""
    return dtype.itemsize == 2


def rounded_up(count: int) -> int:
    """The next of the counts in use: all up to 2 * STEPS, then STEPS in each doubling."""
    grain = 1 << max(0, (count - 1).bit_length() - STEPS.bit_length())
    return -(-count // grain) * grain
