"""Choosing the type to compute in."""

from __future__ import annotations

import pytest
import torch
from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.loader import load
from pagefleet_engine.loader.load import resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_request_is_obeyed(name: str, device: torch.device) -> None:
    assert resolve_dtype(name, "float32", device) == getattr(torch, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpoint", ["float32", "bfloat16", "float16", "float64"])
def test_auto_on_a_cpu_is_what_it_does_fast(
    native: bool, compiled: bool, checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "cpu_has_native_bfloat16", lambda: native)
    fast = torch.bfloat16 if native or compiled else torch.float32
    assert resolve_dtype("auto", checkpoint, CPU, compiled_kernels=compiled) == fast


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        ("float32", torch.bfloat16),
        ("float64", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
    ],
)
def test_auto_on_a_gpu_is_the_checkpoints(checkpoint: str, expected: torch.dtype) -> None:
    assert resolve_dtype("auto", checkpoint, CUDA) == expected


@pytest.mark.parametrize("instructions", [False, True])
@pytest.mark.parametrize("used", [False, True])
def test_native_bfloat16_is_what_the_processor_has_and_onednn_uses(
    instructions: bool, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: used)
    assert load.cpu_has_native_bfloat16() == (instructions and used)


def test_an_unknown_type_names_those_that_can_be_read() -> None:
    with pytest.raises(ModelLoadError, match="dtype int4 is not supported; give float64, float32, bfloat16, float16"):
        resolve_dtype("auto", "int4", CPU)
