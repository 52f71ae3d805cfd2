"""The driver's answers, and the step that follows from them."""

# ruff: noqa: N802  # NVML has its own names

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from pagefleet_engine import gpu_size, settings
from pagefleet_engine.gpu_size import GpuSize, first_gpu

H200, A100, L4 = GpuSize(150 * 10**9, (9, 0)), GpuSize(85 * 10**9, (8, 0)), GpuSize(24 * 10**9, (8, 9))


class Driver:
    """NVML with some GPUs."""

    def __init__(self, gpus: dict[str, GpuSize], failing: str = "") -> None:
        self._gpus, self._failing = gpus, failing
        self._chosen = H200

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 999 if name == self._failing else getattr(self, f"answer_{name}")(*arguments)

    def answer_nvmlInit_v2(self) -> int:
        return 0

    def answer_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return self._choose(str(index.value))

    def answer_nvmlDeviceGetHandleByUUID(self, identifier: bytes, handle: Any) -> int:
        return self._choose(identifier.decode())

    def answer_nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self._chosen.memory
        return 0

    def answer_nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._chosen.capability
        return 0

    def _choose(self, name: str) -> int:
        if name not in self._gpus:
            return 6
        self._chosen = self._gpus[name]
        return 0


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, H200), ("1", A100), ("GPU-4f,0", L4), ("7", None), ("", None), ("-1", None)]
)
def test_the_first_visible_gpu_is_asked(
    visible: str | None, expected: GpuSize | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver({"0": H200, "1": A100, "GPU-4f": L4}))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert first_gpu() == expected


@pytest.mark.parametrize("failing", ["nvmlInit_v2", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability"])
def test_a_driver_that_does_not_say_is_none(failing: str) -> None:
    assert gpu_size._ask(Driver({"0": H200}, failing), "0") is None
    assert first_gpu("no-such-library.so") is None


@pytest.mark.parametrize(
    ("gpu", "given", "tokens", "seats"),
    [
        (H200, {}, 8192, 256),
        (H200, {"device": "cpu"}, 2048, 256),
        (H200, {"max_num_batched_tokens": 128}, 128, 128),
        (H200, {"max_num_seqs": 9000}, 9000, 9000),
        (A100, {}, 2048, 256),
        (L4, {"max_num_seqs": 4000}, 4000, 4000),
        (None, {}, 2048, 256),
    ],
)
def test_steps_are_as_large_as_the_gpu(
    gpu: GpuSize | None, given: dict[str, Any], tokens: int, seats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "first_gpu", lambda: gpu)
    scheduler = settings.engine_config({"model": "m", **given}).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seats)
