"""Scales of one layer's KV cache, which a checkpoint that was calibrated for an fp8 cache brings with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.weight import Placement, Weight


class KVScales:
    """Slots `k_scale` and `v_scale` where the placement's checkpoint has them, else none."""

    __slots__ = ("_arrived", "_install", "_path", "_slots")

    def __init__(self, placement: Placement, install: Callable[[float, float], None]) -> None:
        """`install` gets both scales, once; a stored number stands for itself times its scale."""
        self._install, self._path = install, placement.path
        self._arrived: dict[str, float] = {}
        has_scales = placement.quantization is not None and placement.quantization.kv_scales
        self._slots = {
            name: Weight((1,), None, placement, partial(self._take, name), dtype=torch.float32)
            for name in (("k_scale", "v_scale") if has_scales else ())
        }

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """See HasWeights."""
        yield from self._slots.items()

    def _take(self, name: str, value: Tensor) -> None:
        scale = float(value)
        if not 0.0 < scale < float("inf"):
            raise ModelLoadError(f"{self._path}.{name} is {scale}, no scale: give --kv-cache-dtype auto")
        self._arrived[name] = scale
        if len(self._arrived) == len(self._slots):
            self._install(self._arrived["k_scale"], self._arrived["v_scale"])
