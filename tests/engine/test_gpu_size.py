"""The driver's answers, and the step that follows from them."""

# ruff: noqa: N802  # NVML has its own names

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from pagefleet_engine import settings
from pagefleet_engine.gpu_size import GpuSize, first_gpu, gpu_energy, visible_gpus

H200, A100, L4 = GpuSize(150 * 10**9, (9, 0)), GpuSize(85 * 10**9, (8, 0)), GpuSize(24 * 10**9, (8, 9))


class Driver:
    """NVML with some GPUs."""

    def __init__(self, gpus: dict[str, GpuSize], failing: str = "") -> None:
        self._gpus, self.failing = gpus, failing
        self.millijoules = 10**12
        self._chosen = H200

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 999 if name == self.failing else getattr(self, f"answer_{name}")(*arguments)

    def answer_nvmlInit_v2(self) -> int:
        return 0

    def answer_nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        return self._choose(str(index.value))

    def answer_nvmlDeviceGetHandleByUUID(self, identifier: bytes, handle: Any) -> int:
        return self._choose(identifier.decode())

    def answer_nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len([name for name in self._gpus if name.isdecimal()])
        return 0

    def answer_nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = self._chosen.memory
        return 0

    def answer_nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = self._chosen.capability
        return 0

    def answer_nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:
        energy._obj.value = self.millijoules
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
def test_a_driver_that_does_not_say_is_none(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver({"0": H200}, failing))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert first_gpu() is None


def test_energy_is_counted_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({"0": H200})
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meter = gpu_energy()
    assert meter is not None
    assert meter.joules() == 0.0
    driver.millijoules += 2500
    assert meter.joules() == 2.5
    driver.failing = "nvmlDeviceGetTotalEnergyConsumption"
    assert meter.joules() is None


def test_a_gpu_without_a_meter_tells_no_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver({"0": H200}, "nvmlDeviceGetTotalEnergyConsumption"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_energy() is None


@pytest.mark.parametrize(
    ("variable", "expected"),
    [(None, ["0", "1"]), ("1, GPU-4f", ["1", "GPU-4f"]), ("1,-1,0", ["1"]), ("", []), ("-1", [])],
)
def test_visible_gpus_are_named_as_cuda_takes_them(
    variable: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Driver({"0": H200, "1": A100, "GPU-4f": L4}))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert visible_gpus() == expected


def test_energy_is_that_of_all_gpus_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver({"0": H200, "1": A100})
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    meter = gpu_energy(2)
    assert meter is not None
    driver.millijoules += 1000
    assert meter.joules() == 2.0


def test_without_a_driver_there_is_no_gpu() -> None:
    assert visible_gpus("no-such-library.so") == []
    assert first_gpu("no-such-library.so") is None
    assert gpu_energy(library="no-such-library.so") is None


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
