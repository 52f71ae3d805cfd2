"""Grids of which `make test` runs as much as meets every value once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def each_once(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the axes' values as pytest's parameters.

    As many as the longest axis has values run daily, and hold each value of each axis; the rest is nightly.
    """
    daily = {tuple(row % len(axis) for axis in axes) for row in range(max(map(len, axes)))}
    cells = product(*(range(len(axis)) for axis in axes))
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, cell, strict=True)),
            marks=() if cell in daily else pytest.mark.nightly,
        )
        for cell in cells
    ]
