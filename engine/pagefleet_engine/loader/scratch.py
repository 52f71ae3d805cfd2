"""Memory of this machine that is filled with one tensor after another."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pagefleet_engine.layers.weight import Weight, new_tensor

# A tensor may lie in memory that is so many times as large as it needs.
_MOST_WASTE = 2.0


class Scratch:
    """Lends memory to tensors that are copied soon; others get memory of their own."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}
        """By address: the memory under each tensor that is out."""

    def make(self, weight: Weight) -> Tensor:
        """An uninitialised tensor for all of the weight."""
        if not weight.kept.is_copy:
            return new_tensor(weight)
        num_bytes = math.prod(weight.shape) * weight.dtype.itemsize
        memory = self._take(num_bytes)
        tensor = memory[:num_bytes].view(weight.dtype).view(weight.shape)
        self._lent[tensor.data_ptr()] = memory
        return tensor

    def give_back(self, tensor: Tensor) -> None:
        """Nobody uses the tensor any more."""
        self._free.append(self._lent.pop(tensor.data_ptr()))

    def _take(self, num_bytes: int) -> Tensor:
        fitting = [memory for memory in self._free if num_bytes <= memory.numel() <= _MOST_WASTE * num_bytes]
        if not fitting:
            return torch.empty(num_bytes, dtype=torch.uint8)
        smallest = min(fitting, key=Tensor.numel)
        self._free = [memory for memory in self._free if memory is not smallest]
        return smallest
