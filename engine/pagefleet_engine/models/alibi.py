"""Slopes of attention with linear biases (Press et al., arXiv 2108.12409), as models were trained with them."""

from __future__ import annotations

import math


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """A geometric series down to 2^-8; where heads are no power of two, that of the power below, and then every other
    member of the next power's."""
    most = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (head + 1) / most) for head in range(most)]
    between = [2.0 ** (-4.0 * (head + 1) / most) for head in range(0, 2 * most, 2)]
    return (*slopes, *between[: num_heads - most])


def mosaic_slopes(num_heads: int, bias_max: float) -> tuple[float, ...]:
    """A series down to 2^-bias_max for the power of two above, of which every other member comes first."""
    most = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2.0 ** (-bias_max * (head + 1) / most) for head in range(most)]
    if most == num_heads:
        return tuple(slopes)
    return tuple((slopes[1::2] + slopes[::2])[:num_heads])
