"""How long a rank may compute one layer before it counts as hung: by what layers took it before."""

from __future__ import annotations

from pagefleet_engine.executor.vital_signs import OwnSigns

MARGIN = 4.0
"""Of what was seen: contexts grow, and others use the machine."""


class Pace:
    """Of one rank that computes on a CPU. It tells its signs; whoever watches them decides.

    What layers take is known by powers of two of a step's tokens. Steps of more tokens than were seen are expected to
    take as much longer; nothing is expected of the first step.

    Args:
        signs: of the rank.
    """

    def __init__(self, signs: OwnSigns) -> None:
        self._signs = signs
        self._longest: dict[int, float] = {}
        """Number of bits of a step's tokens -> seconds of its longest layer."""
        self._bits = 0

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens begins."""
        self._bits = num_tokens.bit_length()
        expected = self.expected_s(self._bits)
        self._signs.be_patient(None if expected is None else MARGIN * expected)

    def layer(self) -> None:
        """A layer of it, or what comes behind the last one, is computed."""
        took = self._signs.come_to_layer()
        if took > self._longest.get(self._bits, 0.0):
            self._longest[self._bits] = took

    def expected_s(self, bits: int) -> float | None:
        """How long a layer will take at most in a step whose tokens have so many bits; None: nothing is known."""
        larger = [one for one in self._longest if one >= bits]
        if larger:
            return self._longest[min(larger)]
        if not self._longest:
            return None
        largest = max(self._longest)
        return self._longest[largest] * 2.0 ** (bits - largest)
