"""The context that torch finds made: asked of the driver beside the imports, and never a reason not to start."""

from __future__ import annotations

import ctypes

import pytest
from pagefleet_engine.cuda_context import open_ahead


class Driver:
    """Takes calls as libcuda does."""

    def __init__(self, error: int = 0) -> None:
        self.called: list[str] = []
        self._error = error

    def cuInit(self, flags: int) -> int:  # noqa: N802
        self.called.append("cuInit")
        return self._error

    def cuDeviceGet(self, device: object, ordinal: int) -> int:  # noqa: N802
        self.called.append(f"cuDeviceGet {ordinal}")
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, device: object) -> int:  # noqa: N802
        self.called.append("cuDevicePrimaryCtxRetain")
        return 0


@pytest.mark.parametrize(
    ("error", "called"), [(0, ["cuInit", "cuDeviceGet 0", "cuDevicePrimaryCtxRetain"]), (100, ["cuInit"])]
)
def test_the_first_devices_context_is_retained(error: int, called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(error)
    monkeypatch.setattr(ctypes, "CDLL", lambda library: driver)
    thread = open_ahead("auto")
    assert thread is not None
    thread.join()
    assert driver.called == called


@pytest.mark.parametrize("library", ["libnone.so.0", "libm.so.6"])
def test_without_a_driver_nothing_happens(library: str) -> None:
    thread = open_ahead("cuda", library)
    assert thread is not None
    thread.join()


def test_a_cpu_needs_no_context() -> None:
    assert open_ahead("cpu", "libnone.so.0") is None
