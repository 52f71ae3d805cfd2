"""Slots: any order of parts, any source type, handed over once and whole."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.layers.weight import Placement, Weight, prefixed

PLACE = Placement(torch.bfloat16, torch.device("cpu"), use_kernels=False)


@given(
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    columns=st.none() | st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_parts_in_any_order_make_the_whole(rows: list[int], columns: int | None, order: Random) -> None:
    installed: list[torch.Tensor] = []
    slot = Weight(tuple(rows), columns, PLACE, installed.append)
    parts = [torch.full(shape, float(part), dtype=torch.float64) for part, shape in enumerate(slot.part_shapes)]
    sequence = list(enumerate(parts))
    order.shuffle(sequence)
    for part, source in sequence:
        assert not installed
        slot.fill(part, source)
    (whole,) = installed
    assert torch.equal(whole, torch.cat(parts).to(torch.bfloat16))
    assert slot.nbytes == whole.nbytes


def test_a_part_comes_once() -> None:
    slot = Weight((2, 2), None, PLACE, lambda whole: None)
    slot.fill(0, torch.zeros(2))
    with pytest.raises(AssertionError, match="filled once"):
        slot.fill(0, torch.zeros(2))


def test_a_part_has_its_shape() -> None:
    slot = Weight((2,), 3, PLACE, lambda whole: None)
    with pytest.raises(AssertionError, match="checks shapes"):
        slot.fill(0, torch.zeros(2, 1))


def test_names_gain_a_level() -> None:
    class Layer:
        slot = Weight((1,), None, PLACE, lambda whole: None)

        def weights(self):  # type: ignore[no-untyped-def]
            yield "weight", self.slot

    assert list(prefixed("mlp.norm", Layer())) == [("mlp.norm.weight", Layer.slot)]
