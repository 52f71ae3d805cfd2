"""Every type of blocks stands for the numbers that the format's own package gives, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.gguf.blocks import BLOCK_TYPES
from pagefleet_protocol.model_config.gguf_types import OTHER_KINDS

from tests.example_counts import examples


@pytest.mark.parametrize("number", BLOCK_TYPES, ids=lambda number: BLOCK_TYPES[number].name)
@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 301))
def test_numbers_are_those_of_the_reference(number: int, seed: int, count: int) -> None:
    kind = BLOCK_TYPES[number]
    assert GGMLQuantizationType(number).name == kind.name
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (count, kind.num_bytes), np.uint8)
    with np.errstate(all="ignore"):  # random bytes are scales too
        expected = dequantize(blocks, GGMLQuantizationType(number))
    found = kind.decode(torch.from_numpy(blocks)).numpy()
    assert found.dtype == np.float32
    assert found.shape == (count, kind.numbers)
    assert ((found == expected) | (np.isnan(found) & np.isnan(expected))).all()


def test_each_type_of_the_reference_is_known() -> None:
    assert {kind.value: kind.name for kind in GGMLQuantizationType} == dict(OTHER_KINDS) | {
        number: kind.name for number, kind in BLOCK_TYPES.items()
    }
