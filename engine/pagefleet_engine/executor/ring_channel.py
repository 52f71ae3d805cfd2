"""A channel between two stages that compute on CPUs of one machine: tensors through a ring in shared memory."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from pagefleet_engine.executor.ring import Buffer, RingHandles, RingReader, RingWriter
from pagefleet_engine.ranks.stages import NOBODY_LOOKS, Awaiting, check_step

_NUMBER = struct.Struct("=q")
"""Of the step."""


class RingInlet:
    """Implements `Inlet`."""

    def __init__(self, handles: RingHandles, awaiting: Awaiting = NOBODY_LOOKS) -> None:
        self._ring = RingReader(handles)
        self._awaiting = awaiting

    def receive(self, step_id: int, into: Tensor) -> None:
        """See Inlet."""
        with self._awaiting:
            parts = self._ring.receive()
        assert parts is not None, "it waits for ever"
        number, part = parts
        check_step(step_id, *_NUMBER.unpack(number))
        into.view(-1).copy_(torch.frombuffer(part, dtype=into.dtype))


class RingOutlet:
    """Implements `Outlet`."""

    def __init__(self, handles: RingHandles, awaiting: Awaiting = NOBODY_LOOKS) -> None:
        self._ring = RingWriter(handles)
        self._awaiting = awaiting

    def send(self, step_id: int, x: Tensor) -> None:
        """See Outlet."""
        parts: list[Buffer] = [_NUMBER.pack(step_id), x.view(-1).view(torch.uint8).numpy().data]
        with self._awaiting:
            self._ring.send(parts, _wait_on)


def _wait_on() -> None:
    """Whoever started the ranks ends them all where one is gone."""
