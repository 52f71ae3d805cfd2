"""`LLM(device="cuda")` whole, on a make-believe GPU: one device per call, waits for results only, nothing compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.engine.gpu_path.conftest import Served, serve
from tests.fakes.checkpoints import FAMILIES
from tests.fakes.cuda.runtime import GpuKind
from tests.fakes.quantized_checkpoints import Recipe, quantize_checkpoint

GPUS = {"sm_90": GpuKind(), "sm_80": GpuKind("NVIDIA A100", (8, 0), 108)}
RESULT = "pagefleet_engine.worker.model_runner.LaunchedStep.result"


def check(served: Served) -> None:
    assert served.late_forms == []
    assert [wait for wait in served.waits if RESULT not in wait.callers] == []
    assert served.waits, "steps are waited for"


def cases(fast: Iterable[Any], all_of_them: Iterable[Any]) -> list[Any]:
    """The fast ones as they are, the rest for the long run."""
    fast = tuple(fast)
    return [each if each in fast else pytest.param(each, marks=pytest.mark.nightly) for each in all_of_them]


@pytest.mark.parametrize("family", cases(("gemma3_text", "llama", "qwen3"), FAMILIES))
def test_every_family_computes_what_a_cpu_does(
    family: str, make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]]
) -> None:
    served = serve(make_checkpoint(family), computes=True, dtype="float32")
    check(served)
    assert served.tokens == on_cpu(make_checkpoint(family), dtype="float32")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family_serves(family: str, make_checkpoint: Callable[..., Path]) -> None:
    check(serve(make_checkpoint(family, dtype="bfloat16")))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # what torch.compile imports
@pytest.mark.parametrize("kind", cases(("sm_90",), GPUS))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"cuda_graphs": "none"},
        {"cuda_graphs": "piecewise"},
        {"cuda_graphs": "full"},
        {"cuda_graphs": "full_decode_only"},
        {"cascade_attention": True},
        {"async_scheduling": False},
        {"compile": True},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()) or "plain",
)
def test_every_setting_serves(
    settings: dict[str, Any], kind: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    check(serve(make_checkpoint("llama", dtype="bfloat16"), GPUS[kind], cache_dir=str(tmp_path), **settings))


def test_a_prefix_shared_beside_windows_serves(make_checkpoint: Callable[..., Path]) -> None:
    check(serve(make_checkpoint("gemma3_text", dtype="bfloat16"), cascade_attention=True))


INT8, FP8 = Recipe("int", "channel"), Recipe("float", "channel")
FIXED, BLOCKS = Recipe("float", "tensor", "tensor"), Recipe("float", "block", "group", (16, 16), plain_fp8=True)


@pytest.mark.parametrize("recipe", cases((INT8, FP8), (INT8, FP8, FIXED, BLOCKS)), ids=str)
def test_every_quantized_checkpoint_computes_what_a_cpu_does(
    recipe: Recipe, make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    folder = quantize_checkpoint(make_checkpoint("llama"), tmp_path / "quantized", recipe)
    served = serve(folder, computes=True, dtype="float32")
    check(served)
    assert served.tokens == on_cpu(folder, dtype="float32")


@pytest.mark.parametrize("recipe", [FIXED, BLOCKS], ids=str)
def test_every_kind_of_scale_serves(recipe: Recipe, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    check(serve(quantize_checkpoint(make_checkpoint("llama", dtype="bfloat16"), tmp_path / "quantized", recipe)))
