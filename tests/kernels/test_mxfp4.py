"""Numbers of four bits, one by one."""

from __future__ import annotations

import torch
from pagefleet_kernels.mxfp4 import LARGEST_SCALE, dequantize_mxfp4

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_every_code_and_scale() -> None:
    """The first number of a pair lies in the lower half of its byte; a code's eighth bit is its sign."""
    values = [*E2M1, *(-value for value in E2M1)]
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    for power in (0, 1, 100, 127, LARGEST_SCALE):
        found = dequantize_mxfp4(codes, torch.full((16, 1), power, dtype=torch.uint8))
        expected = [[values[code % 16], values[code // 16]] for code in range(256)]
        assert torch.equal(
            found.double(), torch.tensor(expected, dtype=torch.float64).view(16, 32) * 2.0 ** (power - 127)
        )
