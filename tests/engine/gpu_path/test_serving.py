"""`LLM(device="cuda")` whole, on a make-believe GPU: one device per call, waits for results only, nothing compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagefleet_engine import LLM
from pagefleet_engine.attention import flash_backend
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.worker import runner_factory

from tests.engine.gpu_path.conftest import ALL, LIMITS, MIXED, NUM_GREEDY, Served, serve
from tests.fakes.checkpoints import FAMILIES
from tests.fakes.cuda.device import fake_gpu
from tests.fakes.cuda.runtime import GpuKind
from tests.fakes.flash_attention import fake_flash
from tests.fakes.packed_checkpoints import Packed, packed_checkpoint
from tests.fakes.quantized_checkpoints import Recipe, mxfp4_checkpoint, quantize_checkpoint

GPUS = {"sm_90": GpuKind(), "sm_80": GpuKind("NVIDIA A100", (8, 0), 108)}
ALL_BATCHES: tuple[dict[str, Any], ...] = ({}, {"async_scheduling": False})
"""Settings with which every way to sample is tried."""
DECODE_TWICE = ("gemma3_text", "llama")
"""One family with windows and one without: a decode that follows another."""
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
    settings: dict[str, Any] = {"dtype": "float32", "num_tokens": NUM_GREEDY + (family in DECODE_TWICE)}
    served = serve(make_checkpoint(family), batches=MIXED, computes=True, **settings)
    check(served)
    assert served.tokens == on_cpu(make_checkpoint(family), **settings)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_every_family_serves(family: str, make_checkpoint: Callable[..., Path]) -> None:
    check(serve(make_checkpoint(family, dtype="bfloat16"), batches=MIXED, cuda_graph_sizes="2,16"))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # what torch.compile imports
@pytest.mark.parametrize("kind", cases(("sm_90",), GPUS))
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
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
    folder, batches = make_checkpoint("llama", dtype="bfloat16"), ALL if settings in ALL_BATCHES else MIXED
    check(serve(folder, GPUS[kind], batches=batches, cache_dir=str(tmp_path), **settings))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_processors_serve(
    dtype: str, make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]], monkeypatch: Any
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "plugin")
    computes = dtype == "float32"
    folder = make_checkpoint("llama", dtype=dtype)
    served = serve(folder, computes=computes, dtype=dtype, logits_processors="no_repeat")
    check(served)
    if computes:
        assert served.tokens == on_cpu(folder, dtype=dtype, logits_processors="no_repeat")


def test_a_prefix_shared_beside_windows_serves(make_checkpoint: Callable[..., Path]) -> None:
    check(serve(make_checkpoint("gemma3_text", dtype="bfloat16"), batches=MIXED, cascade_attention=True))


INT8, FP8 = Recipe("int", "channel"), Recipe("float", "channel")
AWQ, ORDERED = Packed("awq", zeros=True), Packed("gptq", zeros=True, ordered=True)
FIXED, BLOCKS = Recipe("float", "tensor", "tensor"), Recipe("float", "block", "group", (16, 16), plain_fp8=True)


@pytest.mark.parametrize("recipe", cases((INT8, FP8), (INT8, FP8, FIXED, BLOCKS)), ids=str)
def test_every_quantized_checkpoint_computes_what_a_cpu_does(
    recipe: Recipe, make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    folder = quantize_checkpoint(make_checkpoint("llama"), tmp_path / "quantized", recipe)
    served = serve(folder, batches=MIXED, computes=True, dtype="float32")
    check(served)
    assert served.tokens == on_cpu(folder, dtype="float32")


@pytest.mark.parametrize(
    "packed",
    cases((AWQ,), (AWQ, Packed("gptq", ordered=True), Packed("pack-quantized", 8, group=None))),
    ids=str,
)
def test_numbers_of_a_few_bits_compute_what_a_cpu_does(
    packed: Packed, make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    folder = packed_checkpoint(make_checkpoint("llama"), tmp_path / "packed", packed)
    served = serve(folder, batches=MIXED, computes=True, dtype="float32")
    check(served)
    assert served.tokens == on_cpu(folder, dtype="float32")


@pytest.mark.parametrize("recipe", [FIXED, BLOCKS], ids=str)
def test_every_kind_of_scale_serves(recipe: Recipe, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = quantize_checkpoint(make_checkpoint("llama", dtype="bfloat16"), tmp_path / "quantized", recipe)
    check(serve(folder, batches=MIXED))


@pytest.mark.parametrize("packed", cases((ORDERED,), (ORDERED, AWQ)), ids=str)
def test_experts_of_a_few_bits_compute_what_a_cpu_does(
    packed: Packed, make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    folder = packed_checkpoint(make_checkpoint("qwen3_moe", moe_intermediate_size=64), tmp_path / "packed", packed)
    served = serve(folder, batches=MIXED, computes=True, dtype="float32")
    check(served)
    assert served.tokens == on_cpu(folder, dtype="float32")


@pytest.mark.parametrize("inputs", cases(("token",), ("token", "tensor")))
def test_experts_with_zero_points_compute_what_a_cpu_does(
    inputs: str, make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    recipe = Recipe("int", "channel", inputs, zeros=True)
    folder = quantize_checkpoint(make_checkpoint("qwen3_moe"), tmp_path / "quantized", recipe)
    served = serve(folder, batches=MIXED, computes=True, dtype="float32")
    check(served)
    assert served.tokens == on_cpu(folder, dtype="float32")


def test_experts_in_four_bits_serve(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = mxfp4_checkpoint(make_checkpoint("gpt_oss", dtype="bfloat16"), tmp_path / "mxfp4")
    check(serve(folder, batches=MIXED))


@pytest.mark.nightly
def test_experts_in_four_bits_compute_what_a_cpu_does(
    make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]], tmp_path: Path
) -> None:
    folder = mxfp4_checkpoint(make_checkpoint("gpt_oss"), tmp_path / "mxfp4")
    served = serve(folder, batches=MIXED, computes=True, dtype="float32")
    check(served)
    assert served.tokens == on_cpu(folder, dtype="float32")


FLASH: dict[str, Any] = {"attention_backend": "flash", "block_size": 256, "num_kv_blocks": 64}
AUTO = FLASH | {"attention_backend": "auto"}
ATTENDS = "torch_attn::_varlen_attn"


@pytest.mark.parametrize("graphs", ["none", "piecewise", "full", "full_and_piecewise"])
def test_flash_attention_serves_in_graphs_and_without(graphs: str, make_checkpoint: Callable[..., Path]) -> None:
    with fake_flash(2) as flash:
        served = serve(make_checkpoint("llama", dtype="bfloat16"), batches=MIXED, cuda_graphs=graphs, **FLASH)
    check(served)
    assert flash.calls
    held = [any(launched.name.startswith(ATTENDS) for launched in graph) for graph in served.graphs]
    assert any(held) == graphs.startswith("full")
    kernels = {launched.name for graph in served.graphs for launched in graph}
    assert "paged_attention_kernel" not in kernels


def test_flash_attention_with_windows_computes_what_a_cpu_does(
    make_checkpoint: Callable[..., Path], on_cpu: Callable[..., list[list[int]]]
) -> None:
    folder = make_checkpoint("gemma3_text", dtype="float16")
    with fake_flash(2):
        served = serve(folder, batches=MIXED, computes=True, **FLASH)
    check(served)
    assert served.tokens == on_cpu(folder)


def test_flash_attention_3_is_taken_where_it_is_and_reads_small_blocks(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    activated: list[str] = []
    monkeypatch.setattr(flash_backend, "newest_flash", lambda device: 3)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    with fake_flash(3) as flash:
        check(serve(make_checkpoint("llama", dtype="bfloat16"), batches=MIXED, attention_backend="flash"))
    assert set(activated) == {"FA3"}
    assert flash.calls


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("gemma2", FLASH, "layer 0 has a soft cap"),
        ("llama4_text", FLASH, "layer 0 has attention within chunks"),
        ("llama", FLASH | {"kv_cache_dtype": "fp8"}, "16 bits, not float8_e4m3fn"),
        ("llama", FLASH | {"block_size": 16}, "give --block-size 256"),
    ],
)
def test_what_flash_attention_does_not_take_is_refused_while_loading(
    family: str, settings: dict[str, Any], why: str, make_checkpoint: Callable[..., Path]
) -> None:
    folder = make_checkpoint(family, dtype="bfloat16")
    with fake_flash(2), fake_gpu(), pytest.raises(ConfigError, match=why):
        LLM(str(folder), device="cuda", **(LIMITS | settings))


@pytest.mark.parametrize("backend", ["triton", "flash"])
def test_a_cpu_refuses_the_kernels_of_a_gpu(backend: str, make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=f"--attention-backend {backend} needs a GPU.*: leave it out"):
        LLM(str(make_checkpoint("llama")), device="cpu", attention_backend=backend, **LIMITS)


def test_where_it_was_measured_to_be_faster_auto_takes_it_layer_by_layer(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_factory, "FLASH_IS_FASTER", {"sm_90"})
    with fake_flash(2) as flash:
        check(
            serve(make_checkpoint("llama", dtype="bfloat16"), batches=MIXED, **(FLASH | {"attention_backend": "auto"}))
        )
        assert flash.calls
        flash.calls.clear()
        check(
            serve(make_checkpoint("gemma2", dtype="bfloat16"), batches=MIXED, **(FLASH | {"attention_backend": "auto"}))
        )
        assert flash.calls == []
