"""Which implementation runs: by device, by request, and without Triton on the machine."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from pagefleet_kernels import _triton
from pagefleet_kernels.dispatch import architecture, choose_backend
from pagefleet_kernels.errors import BackendUnavailableError

CPU = torch.device("cpu")


def test_cpu_tensors_go_to_the_twin_even_where_the_interpreter_could_run() -> None:
    assert choose_backend(CPU) == "torch"


def test_cuda_tensors_go_to_triton_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "IMPORTED", True)
    assert choose_backend(torch.device("cuda:0")) == "triton"
    monkeypatch.setattr(_triton, "IMPORTED", False)
    assert choose_backend(torch.device("cuda:0")) == "torch"


def test_the_caller_can_force_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "IMPORTED", True)
    monkeypatch.setattr(_triton, "INTERPRETED", True)
    assert choose_backend(CPU, "triton") == "triton"
    assert choose_backend(torch.device("cuda:0"), "torch") == "torch"


def test_compiled_kernels_refuse_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "IMPORTED", True)
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    with pytest.raises(BackendUnavailableError, match=r"device 'cpu'.*TRITON_INTERPRET"):
        choose_backend(CPU, "triton")


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "IMPORTED", False)
    with pytest.raises(BackendUnavailableError, match="`triton` package"):
        choose_backend(CPU, "triton")


def test_unknown_backend_is_refused() -> None:
    unknown: Any = "cuda"
    with pytest.raises(BackendUnavailableError, match="'triton' or 'torch'"):
        choose_backend(CPU, unknown)


def test_architecture_without_a_gpu() -> None:
    assert architecture(CPU) == "interpreter"


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # what an import finds where the package is not installed
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "triton" else find_spec(name, package)
import torch
from pagefleet_kernels import activation, attention, kv_cache, norm
out = activation.gated_activation(torch.ones(2, 8)), norm.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
assert torch.allclose(out[1], torch.ones(2, 8)) and out[0].shape == (2, 4)
"""

CPU_BUILD = """
import sys, torch
from pagefleet_kernels import activation, attention, kv_cache, norm
activation.gated_activation(torch.ones(2, 8))
sys.exit(torch.version.cuda is None and "triton" in sys.modules)
"""


@pytest.mark.parametrize("code", [WITHOUT_TRITON, CPU_BUILD], ids=["not installed", "not needed"])
def test_twins_work_without_importing_triton(code: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
