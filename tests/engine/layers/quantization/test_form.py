"""Where quantized weights stay in eight bits, and what is said where they do not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from pagefleet_engine.layers.linear import Linear
from pagefleet_engine.layers.quantization.form import (
    Form,
    describe_forms,
    form_of,
    form_on_cpu,
    form_with_kernels,
    kept_dtype,
)
from pagefleet_engine.layers.quantization_scheme import (
    CodedScheme,
    PackedScheme,
    Quantization,
    QuantizationScheme,
    Rule,
)
from pagefleet_engine.layers.weight import Placement

from tests.fakes.native_kernels import native_library

CPU = torch.device("cpu")
FP8 = QuantizationScheme(number="fp8", weight_scales="channel", input_scales="token")
INT8 = QuantizationScheme(number="int8", weight_scales="channel", input_scales="token")
WEIGHTS_ONLY = QuantizationScheme(number="fp8", weight_scales="channel", input_scales="none")


def blocks(rows: int, columns: int) -> QuantizationScheme:
    return QuantizationScheme(number="fp8", weight_scales="block", input_scales="group", block=(rows, columns))


@pytest.mark.parametrize("scheme", [FP8, INT8, blocks(128, 128)], ids=QuantizationScheme.describe)
def test_a_gpu_that_multiplies_fp8_needs_no_excuse(scheme: QuantizationScheme) -> None:
    for capability in ((8, 9), (9, 0), (10, 0)):
        assert form_with_kernels(scheme, 4096, capability) == (Form.SCALED, "")


def test_an_older_gpu_keeps_eight_bits_and_says_so() -> None:
    assert form_with_kernels(FP8, 4096, (8, 0)) == (
        Form.SCALED,
        "sm_80 does not multiply fp8 (sm_89 and later do)",
    )
    assert form_with_kernels(INT8, 4096, (8, 0)) == (Form.SCALED, "")


@pytest.mark.parametrize(
    ("scheme", "inputs", "reason"),
    [
        (blocks(128, 64), 4096, "square blocks of a power of two, not 128x64"),
        (blocks(96, 96), 4096, "not 96x96"),
        (blocks(8, 8), 4096, "not 8x8"),
        (blocks(128, 128), 4000, "4000 inputs are no multiple"),
    ],
)
def test_blocks_that_no_kernel_takes_are_expanded(scheme: QuantizationScheme, inputs: int, reason: str) -> None:
    form, said = form_with_kernels(scheme, inputs, (9, 0))
    assert form is Form.EXPANDED
    assert reason in said


def test_a_cpu_multiplies_int8_where_it_can() -> None:
    assert form_on_cpu(INT8, has_int8=True) == (Form.PACKED_INT8, "")
    assert form_on_cpu(INT8, has_int8=False) == (Form.RESCALED, "this CPU has no int8 dot product")
    assert form_on_cpu(FP8, has_int8=True)[0] is Form.RESCALED
    assert form_on_cpu(WEIGHTS_ONLY, has_int8=True)[0] is Form.EXPANDED
    assert form_on_cpu(blocks(128, 128), has_int8=True)[0] is Form.EXPANDED


W4A16 = PackedScheme(packing="awq", bits=4, group_size=128, zero_points=True)


@pytest.mark.parametrize(
    ("scheme", "inputs", "reason"),
    [
        (W4A16, 4096, ""),
        (replace(W4A16, group_size=48), 96, ""),
        (replace(W4A16, group_size=None), 4096, ""),
        (replace(W4A16, inputs=INT8.rounding), 4096, ""),
        (replace(W4A16, inputs=FP8.rounding), 4096, "round inputs to int8"),
        (replace(W4A16, group_size=24), 4800, "a multiple of 16 inputs"),
        (replace(W4A16, group_size=16), 48, "a multiple of 16 inputs"),
        (replace(W4A16, bits=8, group_size=16), 48, ""),
    ],
)
def test_compiled_kernels_keep_the_bits_of_groups_that_they_take(
    scheme: PackedScheme, inputs: int, reason: str
) -> None:
    form, said = form_of(scheme, inputs, Placement(torch.bfloat16, CPU, False, native=native_library()))
    assert form is (Form.EXPANDED if reason else Form.NATIVE)
    assert reason in said


def test_without_compiled_kernels_few_bits_are_expanded() -> None:
    for placement in (
        Placement(torch.bfloat16, CPU, False),
        Placement(torch.float16, CPU, False, native=native_library()),
    ):
        form, said = form_of(W4A16, 4096, placement)
        assert form is Form.EXPANDED
        assert "without compiled kernels" in said


def test_compiled_kernels_keep_codes_of_4_bits() -> None:
    scheme = CodedScheme(table="nf4", scales="float32", group_size=64, spelling="bitsandbytes")
    native, torch_alone = (Placement(torch.bfloat16, CPU, False, native=one) for one in (native_library(), None))
    assert form_of(scheme, 4096, native) == (Form.NATIVE, "")
    for other, inputs in ((replace(scheme, group_size=24), 4800), (replace(scheme, group_size=16), 48)):
        assert form_of(other, inputs, native)[0] is Form.EXPANDED
    assert form_of(scheme, 4096, torch_alone)[1] == "without compiled kernels a CPU multiplies floats"
    mxfp4 = QuantizationScheme(number="mxfp4", weight_scales="block", input_scales="none", block=(1, 32))
    assert form_of(mxfp4, 4096, native)[0] is Form.NATIVE
    assert form_of(mxfp4, 4096, torch_alone)[0] is Form.EXPANDED


def test_compiled_kernels_multiply_int8_whose_inputs_lie_around_zero() -> None:
    placement = Placement(torch.bfloat16, CPU, False, native=native_library())
    assert form_of(INT8, 4096, placement) == (Form.NATIVE, "")
    for scheme in (FP8, WEIGHTS_ONLY, replace(INT8, input_zero_points=True)):
        assert form_of(scheme, 4096, placement)[0] is not Form.NATIVE
    assert form_of(INT8, 4090, placement)[0] is not Form.NATIVE


WHAT_ONEDNN_USES = """
from pagefleet_engine.layers.quantization.form import has_onednn_int8
from pagefleet_engine.loader.load import cpu_has_native_bfloat16
print(has_onednn_int8(), cpu_has_native_bfloat16())
"""


def test_instructions_that_onednn_may_not_use_are_not_counted_on() -> None:
    """Whatever this processor has: a product of bytes in AVX2 overflows, and one of bfloat16 is emulated."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    found = subprocess.run(
        [sys.executable, "-c", WHAT_ONEDNN_USES], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["False", "False"]


def test_the_log_says_what_becomes_of_each_scheme() -> None:
    rules = (Rule(("re:.*mlp.*",), blocks(128, 128)), Rule(("Linear",), FP8))
    place = Placement(torch.bfloat16, CPU, use_kernels=True)
    assert describe_forms(Quantization(rules=rules), (1024, 1000, 512), place) == [
        "fp8 weights per block 128x128, inputs per token and group: weights are kept as they are stored, multiplied by "
        "pagefleet_kernels",
        "fp8 weights per block 128x128, inputs per token and group: weights are kept expanded to the model's type "
        "(1000 inputs are no multiple of a block of 128)",
        "fp8 weights per channel, inputs per token: weights are kept as they are stored, multiplied by "
        "pagefleet_kernels",
    ]


def test_what_torch_compile_traces_is_expanded() -> None:
    place = Placement(torch.float32, CPU, False, Quantization(rules=(Rule(("Linear",), FP8),)), "o_proj", True)
    layer = Linear(64, (32,), False, place)
    slots = dict(layer.weights())
    assert slots["weight"].kept.dtype == torch.float32
    slots["weight"].fill(0, torch.ones(32, 64).to(torch.float8_e4m3fn))
    slots["weight_scale"].fill(0, torch.full((32,), 0.5))
    assert torch.equal(layer(torch.full((2, 64), 3.0)), torch.full((2, 32), 96.0))
    assert form_of(FP8, 64, place)[1].startswith("--compile")


def test_types_that_stay_in_memory() -> None:
    assert kept_dtype(FP8, Form.SCALED, torch.bfloat16) == torch.float8_e4m3fn
    assert kept_dtype(INT8, Form.PACKED_INT8, torch.bfloat16) == torch.int8
    assert kept_dtype(FP8, Form.RESCALED, torch.float16) == torch.bfloat16  # float16 has not fp8's range of products
    assert kept_dtype(FP8, Form.RESCALED, torch.float32) == torch.float32
    assert kept_dtype(FP8, Form.EXPANDED, torch.float16) == torch.float16


def test_eight_bits_take_half_the_memory_of_sixteen() -> None:
    def weight_bytes(quantization: Quantization | None) -> int:
        layer = Linear(1024, (512,), False, Placement(torch.bfloat16, CPU, True, quantization, "o_proj"))
        return sum(slot.nbytes for _, slot in layer.weights())

    plain, quantized = weight_bytes(None), weight_bytes(Quantization(rules=(Rule(("Linear",), FP8),)))
    assert plain == 2 * 1024 * 512
    assert quantized == plain // 2 + 4 * 512
