"""What calibration keeps of a matrix's inputs: all their products with each other, or some of them.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Inputs(Protocol):
    """Of one matrix."""

    num_tokens: int

    def see(self, x_TI: Tensor) -> None:
        """Take in more."""
        ...

    def square_of(self, weight_OI: Tensor) -> float:
        """The squares of the products of these weights with the inputs, summed; float32."""
        ...


class Gram:
    """All products of inputs with each other, summed over tokens; implements `Inputs`."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.gram_II = torch.zeros(0, 0)

    def see(self, x_TI: Tensor) -> None:
        """See Inputs."""
        if not self.num_tokens:
            self.gram_II = torch.zeros(x_TI.shape[1], x_TI.shape[1])
        self.num_tokens += len(x_TI)
        x_TI = x_TI.float()
        self.gram_II.addmm_(x_TI.t(), x_TI)

    def square_of(self, weight_OI: Tensor) -> float:
        """See Inputs."""
        return float((weight_OI @ self.gram_II).mul_(weight_OI).sum())


class Sample:
    """One of `every` tokens, and the mean size of each input over all; implements `Inputs`."""

    def __init__(self, every: int) -> None:
        self.num_tokens = 0
        self._every = every
        self._sum_I = torch.zeros(0)
        self._rows: list[Tensor] = []

    def see(self, x_TI: Tensor) -> None:
        """See Inputs."""
        if not self.num_tokens:
            self._sum_I = torch.zeros(x_TI.shape[1])
        self.num_tokens += len(x_TI)
        self._sum_I += x_TI.abs().sum(0, dtype=torch.float32)
        self._rows.append(x_TI[:: self._every].float())

    def mean_sizes(self) -> Tensor:
        """The mean size of each input, [I]."""
        return self._sum_I / self.num_tokens

    def square_of(self, weight_OI: Tensor) -> float:
        """See Inputs."""
        return sum(float((rows_TI @ weight_OI.t()).square_().sum()) for rows_TI in self._rows)


class Observer:
    """Implements `layers.weight.InputObserver`: keeps inputs of some matrices, once for all that read the same."""

    def __init__(self, wanted: frozenset[str], make: Callable[[], Inputs]) -> None:
        self._wanted, self._make = wanted, make
        self._seen: dict[str, Inputs] = {}
        self.is_open = True
        """Whether what is multiplied counts."""

    def watch(self, names: Sequence[str]) -> Callable[[Tensor], None]:
        """See InputObserver."""
        inputs = self._make()
        if self._wanted.isdisjoint(names):
            return _pass_over
        self._seen |= dict.fromkeys(names, inputs)

        def see(x_TI: Tensor) -> None:
            if self.is_open and len(x_TI):
                inputs.see(x_TI)

        return see

    def of(self, name: str) -> Inputs | None:
        """What the matrix was multiplied with; None: with nothing."""
        inputs = self._seen.get(name)
        return inputs if inputs is not None and inputs.num_tokens else None


def _pass_over(x_TI: Tensor) -> None:
    """Nobody wants it."""
