"""How long a rank may compute one layer before it counts as hung: by what layers took it before."""

from __future__ import annotations

from pagefleet_engine.executor.vital_signs import OwnSigns

MARGIN = 8.0
"""Of what was seen: contexts grow, and others use the machine."""
_KEPT = 0.99
"""Of the longest layer, at each that is shorter."""


class Pace:
    """Of one rank that computes on a CPU. It tells its signs; whoever watches them decides.

    What layers take is known by powers of two of a step's tokens, and forgotten bit by bit: a machine that was stopped
    for a while says nothing about later steps. Nothing is expected of steps larger than any that was seen, nor of what
    comes behind the last layer.

    Args:
        signs: of the rank.
    """

    def __init__(self, signs: OwnSigns) -> None:
        self._signs = signs
        self._longest: dict[int, float] = {}
        """Number of bits of a step's tokens -> seconds of its longest layer."""
        self._bits = self._left = 0
        self.num_layers = 0
        """Of a step."""

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens begins."""
        self._bits, self._left = num_tokens.bit_length(), self.num_layers
        expected = self.expected_s(self._bits)
        self._signs.be_patient(None if expected is None else MARGIN * expected)

    def layer(self) -> None:
        """A layer of it is computed."""
        took = self._signs.come_to_layer()
        self._longest[self._bits] = max(took, _KEPT * self._longest.get(self._bits, 0.0))
        self._left -= 1
        if self._left == 0:
            self._signs.be_patient(None)

    def expected_s(self, bits: int) -> float | None:
        """How long a layer will take at most in a step whose tokens have so many bits; None: nothing is known."""
        larger = [one for one in self._longest if one >= bits]
        return self._longest[min(larger)] if larger else None
