"""How long a rank may compute before it counts as hung: by what layers, or steps, took it before."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagefleet_engine.executor.vital_signs import OwnSigns

MARGIN = 8.0
"""Of what was seen: contexts grow, and others use the machine."""
_KEPT = 0.99
"""Of the longest time, at each that is shorter."""


class _Longest:
    """What was seen, by powers of two of a step's tokens, and forgotten bit by bit: a machine that was stopped for a
    while says nothing about later steps. Nothing is expected of steps larger than any that was seen."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """By the number of bits of a step's tokens."""

    def add(self, bits: int, seconds: float) -> None:
        self._seconds[bits] = max(seconds, _KEPT * self._seconds.get(bits, 0.0))

    def expected_s(self, bits: int) -> float | None:
        larger = [one for one in self._seconds if one >= bits]
        return self._seconds[min(larger)] if larger else None

    def patience_s(self, bits: int) -> float | None:
        expected = self.expected_s(bits)
        return None if expected is None else MARGIN * expected


class Pace:
    """Of one rank that computes on a CPU. It tells its signs; whoever watches them decides.

    Nothing is expected of what comes behind the last layer.

    Args:
        signs: of the rank.
        tell_of_layers: has a function called as each layer of a step is computed; returns how many there are, 0 where
            nobody can tell.
    """

    def __init__(self, signs: OwnSigns, tell_of_layers: Callable[[Callable[[], None]], int]) -> None:
        self._signs = signs
        self._longest = _Longest()
        self._bits = self._left = 0
        self.num_layers = tell_of_layers(self.layer)
        """Of a step."""

    def begin(self, num_tokens: int) -> None:
        """A step of so many tokens begins."""
        self._bits, self._left = num_tokens.bit_length(), self.num_layers
        self._signs.be_patient(self._longest.patience_s(self._bits))

    def layer(self) -> None:
        """A layer of it is computed."""
        self._longest.add(self._bits, self._signs.come_to_layer())
        self._left -= 1
        if self._left == 0:
            self._signs.be_patient(None)

    def expected_s(self, bits: int) -> float | None:
        """How long a layer will take at most in a step whose tokens have so many bits; None: nothing is known."""
        return self._longest.expected_s(bits)


class DevicePace:
    """Of one rank whose steps a GPU computes, apart from its process, one after another.

    A step's time is counted from when the one before it has ended and all is there that it needs of the host. It holds
    what the device waits for other stages, which makes more patient. What the host takes, to compile or to capture,
    is no part of it.
    """

    def __init__(self, signs: OwnSigns) -> None:
        self._signs = signs
        self._longest = _Longest()
        self._step: tuple[int, float] | None = None
        """Bits of its tokens, and since when the device has it."""

    def begin(self, num_tokens: int) -> None:
        """The device has nothing to do before a step of so many tokens; says nothing anew of one that goes on."""
        if self._step is None:
            self._step = num_tokens.bit_length(), time.monotonic()
            self._signs.be_patient_with_device(self._longest.patience_s(self._step[0]))

    def end(self) -> None:
        """That step is computed."""
        if self._step is not None:
            bits, since = self._step
            self._longest.add(bits, time.monotonic() - since)
            self._step = None
            self._signs.be_patient_with_device(None)
