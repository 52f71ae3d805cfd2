"""What the format's own package makes of a packed matrix, where it is installed (`pip install compressed-tensors`)."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.layers.linear import Linear

from tests.engine.layers.quantization.test_packed_layers import numbers, placed
from tests.fakes.packed_checkpoints import Packed, pack, quantize_packed

reference = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")


@pytest.mark.parametrize(
    "packed",
    [
        Packed("pack-quantized"),
        Packed("pack-quantized", zeros=True),
        Packed("pack-quantized", group=None, zeros=True),
        Packed("pack-quantized", 8, group=64),
        Packed("pack-quantized", 8, group=None, zeros=True),
    ],
    ids=str,
)
@torch.inference_mode()
def test_compressed_tensors_reads_the_same_numbers(packed: Packed) -> None:
    stored = pack(quantize_packed(numbers(40, 128) / 9, packed), packed)
    group = packed.config()["config_groups"]["group_0"]
    scheme = reference.QuantizationScheme(
        **{name: value for name, value in group.items() if name != "input_activations"}
    )
    theirs = reference.PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    layer = Linear(128, (40,), False, placed(packed, torch.float32, False, "o_proj"))
    slots = dict(layer.weights())
    for kind, tensor in stored.items():
        if kind in slots:
            slots[kind].fill(0, tensor)
    # theirs are rounded to the type of the scales
    torch.testing.assert_close(layer(torch.eye(128)).t(), theirs.float(), rtol=2e-3, atol=1e-6)
