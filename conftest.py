"""What must be settled before any test module is imported, and which tests share a process."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

pytest_plugins = ["tests.fakes.quick_interpreter", "tests.timings"]


def driver_has_gpu() -> bool:
    """Whether NVIDIA's driver knows a GPU. Asking torch would import it, and CUDA must not start before a fork."""
    try:
        driver = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    count = ctypes.c_uint()
    return driver.nvmlInit_v2() == 0 and driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 and count.value > 0


# Triton reads this when it is first imported, by whichever test comes first. A GPU runs the compiled kernels instead.
os.environ.setdefault("TRITON_INTERPRET", "0" if driver_has_gpu() else "1")

# Several processes test side by side; a torch that computes with a thread per core in each would wait for itself.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if find_spec("hypothesis"):  # a machine with a GPU may lack it: bench/gpu_check.sh needs none of its tests
    from tests.example_counts import register_profiles

    register_profiles()


def pytest_collection_finish() -> None:
    """Keep collected tests and imported modules out of every collection of garbage: each would take 0.2 s."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _draws_are_the_same() -> None:
    """Of torch, where a test names no seed: else they would be others after other tests."""
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(0)


PACKAGES = ("engine", "kv", "kernels", "router", "operator", "protocol", "download", "console")


@pytest.fixture(autouse=True)
def _log_is_put_back() -> Iterator[None]:
    """A program that a test runs in this process sets up the log, on a stream that is closed when the test ends."""
    loggers = [logging.getLogger(), *(logging.getLogger(f"pagefleet_{name}") for name in PACKAGES)]
    before = [(logger.level, logger.propagate, [*logger.handlers]) for logger in loggers]
    yield
    for logger, (level, propagate, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.propagate, logger.handlers[:] = propagate, handlers


if find_spec("xdist"):
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
        """One process runs a file, whose tests share engines; one runs all of e2e/, whose tests share a fleet."""

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "e2e" if file.startswith("e2e/test_") else file

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile | None:
        if config.option.dist != "load":  # somebody asks for another way: kernel tests on a GPU share nothing
            return None
        config.option.loadscopereorder = False  # testpaths has the longest first
        return ByFile(config, log)
