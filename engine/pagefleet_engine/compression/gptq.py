"""GPTQ (Frantar et al., arXiv 2210.17323): inputs are rounded one after another, and each one's error is made up for by
those that are still to come, as far as the layer's inputs say that they can.

Shapes: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagefleet_engine.compression.grid import Grid, Rounded
from pagefleet_engine.compression.settings import ActOrder
from pagefleet_engine.errors import ConfigError

_BLOCK = 128
"""Inputs whose errors reach the rest of the matrix in one product."""
_MOST_DAMPENING = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """How a matrix is rounded."""

    grid: Grid
    group_size: int | None
    """Divides the inputs; None: they are one group."""
    actorder: ActOrder
    dampening_frac: float

    def round(self, weight_OI: Tensor, gram_II: Tensor) -> Rounded:
        """`gram_II`: float32, the products of the layer's inputs with each other, summed over tokens.

        Raises:
            ConfigError: they are so alike that the Hessian has no inverse.
        """
        weight_OI, gram_II = weight_OI.float().clone(), gram_II.clone()
        inputs = weight_OI.shape[1]
        size = self.group_size or inputs
        # Scales are those of the weights as they were: so inputs may be rounded in any order.
        groups = [self.grid.fit(group_OI) for group_OI in torch.split(weight_OI, size, 1)]
        silent_I = gram_II.diagonal() == 0.0  # inputs that were always 0 may become anything
        gram_II.diagonal()[silent_I] = 1.0
        weight_OI[:, silent_I] = 0.0
        order_I = torch.arange(inputs)
        if self.actorder == "weight":
            order_I = gram_II.diagonal().argsort(descending=True, stable=True)
        weight_OI, gram_II = weight_OI[:, order_I], gram_II[order_I][:, order_I]
        factor_II = _inverse_factor(gram_II, self.dampening_frac)

        numbers_OI = torch.empty_like(weight_OI)
        for start in range(0, inputs, _BLOCK):
            stop = min(start + _BLOCK, inputs)
            block_OI, own_II = weight_OI[:, start:stop], factor_II[start:stop, start:stop]
            errors_OI = torch.empty_like(block_OI)
            for column, place in enumerate(order_I[start:stop].tolist()):
                scale_O1, zero_O1 = groups[place // size]
                now_O1 = block_OI[:, column, None]
                number_O1 = self.grid.nearest(now_O1, scale_O1, zero_O1)
                error_O1 = (now_O1 - (number_O1 - zero_O1) * scale_O1) / own_II[column, column]
                block_OI[:, column:] -= error_O1 * own_II[column, column:]
                numbers_OI[:, place, None], errors_OI[:, column, None] = number_O1, error_O1
            weight_OI[:, stop:] -= errors_OI @ factor_II[start:stop, stop:]
        scales_OG, zeros_OG = (torch.cat(parts, 1) for parts in zip(*groups, strict=True))
        return Rounded(numbers_OI, scales_OG, zeros_OG)


def _inverse_factor(gram_II: Tensor, dampening_frac: float) -> Tensor:
    """Upper triangle U of `H^-1 = U^T U`; more is added to a diagonal that rounding errors leave without one."""
    mean = gram_II.diagonal().mean()
    while dampening_frac <= _MOST_DAMPENING:
        damped_II = gram_II.clone()
        damped_II.diagonal().add_(dampening_frac * mean)
        lower_II, failed = torch.linalg.cholesky_ex(damped_II)
        if not failed:
            upper_II: Tensor
            upper_II, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower_II), upper=True)
            if not failed and bool(upper_II.isfinite().all()):
                return upper_II
        dampening_frac = max(10.0 * dampening_frac, 1e-3)
    raise ConfigError("its inputs have no usable Hessian: give more or other calibration text, or --algorithm rtn")
