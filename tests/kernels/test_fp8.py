"""Conversion to and from e4m3 inside kernels: every code, and every rounding that matters."""

import pytest
import torch
from pagefleet_kernels._triton import jit, tl
from pagefleet_kernels.dispatch import architecture
from pagefleet_kernels.fp8 import E5M2, FP8, as_bytes, decode_e4m3, decode_fp8, encode_e4m3, encode_fp8, has_native_fp8

SIZE = 1024


@jit()
def convert(out_ptr, in_ptr, ENCODE: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(in_ptr + index)
    tl.store(out_ptr + index, encode_e4m3(x, NATIVE) if ENCODE else decode_e4m3(x, NATIVE))


@jit()
def convert_e5m2(out_ptr, in_ptr, ENCODE: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(in_ptr + index)
    tl.store(out_ptr + index, encode_fp8(x, 2, False) if ENCODE else decode_fp8(x, 2, False))


def native_or_not(device: torch.device) -> list[bool]:
    return [False, True] if has_native_fp8(device) else [False]


def test_every_code_is_decoded(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    for native in native_or_not(device):
        values = torch.empty(256, device=device)
        convert[(1,)](values, codes, ENCODE=False, NATIVE=native, BLOCK=256)
        torch.testing.assert_close(values, codes.view(FP8).float(), rtol=0, atol=0, equal_nan=True)


def test_values_are_rounded_to_nearest_even_and_saturate(device: torch.device) -> None:
    finite = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    middles = (finite[1:] + finite[:-1]) / 2
    random = torch.randn(350) * 2.0 ** torch.randint(-13, 9, (350,))
    special = torch.tensor([464.0, 465.0, 500.0, 1e9, float("inf"), float("nan"), 1e-9, 0.0])
    some = torch.cat((finite, middles, middles * (1 + 2e-7), middles * (1 - 2e-7), random))
    x = torch.zeros(2 * SIZE)
    both = torch.cat((some, -some, special, -special))
    x[: len(both)] = both
    x = x.to(device)
    expected = as_bytes(x.clamp(-448, 448).to(FP8))
    for native in native_or_not(device):
        codes = torch.empty(2 * SIZE, dtype=torch.uint8, device=device)
        convert[(2,)](codes, x, ENCODE=True, NATIVE=native, BLOCK=SIZE)
        number = ~x.isnan()
        assert torch.equal(codes[number], expected[number])
        assert codes.view(FP8).float()[~number].isnan().all()


@pytest.mark.parametrize(("name", "native"), [("sm_80", False), ("sm_89", True), ("sm_90", True), ("sm_120", True)])
def test_the_instruction_is_there_since_ada(name: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagefleet_kernels.fp8.architecture", lambda device: name)
    assert has_native_fp8(torch.device("cuda", 0)) is native
    monkeypatch.undo()
    assert architecture(torch.device("cpu")) == "interpreter"
    assert not has_native_fp8(torch.device("cpu"))


def test_every_code_of_e5m2_is_decoded(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    values = torch.empty(256, device=device)
    convert_e5m2[(1,)](values, codes, ENCODE=False, BLOCK=256)
    torch.testing.assert_close(values, codes.view(E5M2).float(), rtol=0, atol=0, equal_nan=True)


def test_values_are_rounded_to_e5m2(device: torch.device) -> None:
    finite = torch.arange(124, dtype=torch.uint8).view(E5M2).float()
    middles = (finite[1:] + finite[:-1]) / 2
    random = torch.randn(400) * 2.0 ** torch.randint(-20, 16, (400,))
    special = torch.tensor([57345.0, 61440.0, 61441.0, 1e9, float("inf"), float("nan"), 1e-9, 0.0])
    some = torch.cat((finite, middles, middles * (1 + 2e-7), middles * (1 - 2e-7), random, special))
    x = torch.zeros(2 * SIZE)
    both = torch.cat((some, -some))
    x[: len(both)] = both
    x = x.to(device)
    codes = torch.empty(2 * SIZE, dtype=torch.uint8, device=device)
    convert_e5m2[(2,)](codes, x, ENCODE=True, BLOCK=SIZE)
    number = ~x.isnan()
    assert torch.equal(codes[number], as_bytes(x.clamp(-57344, 57344).to(E5M2))[number])
    assert codes.view(E5M2).float()[~number].isnan().all()
