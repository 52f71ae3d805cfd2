"""Kernels compiled side by side, for a GPU that need not be here: in a process of its own, where Triton compiles."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pagefleet_kernels.compile_ahead import compile_side_by_side

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

COMPILE = """
import torch
torch.version.cuda = "13.0"  # a CPU build of torch keeps the kernels from importing Triton
from triton import CompilationError
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Driver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

driver.set_active(Driver())
from pagefleet_kernels import norm
from pagefleet_kernels._triton import jit, tl
from pagefleet_kernels.compile_ahead import compile_side_by_side

norm.choose_backend, norm.architecture = lambda *_: "triton", lambda _: "sm_90"
x = torch.zeros(4, 64)
with compile_side_by_side(2) as is_possible:
    print(is_possible)
    for unit_offset in (False, True, True):
        norm.rms_norm(x, torch.ones(64), 1e-6, unit_offset=unit_offset)
made = norm._norm_kernel.device_caches[0][0].values()
print(sorted(type(kernel).__name__ for kernel in made), not x.any())

@jit()
def broken_kernel(x_ptr):
    tl.store(x_ptr, nobody_knows_this_name)

with compile_side_by_side(2):
    broken_kernel[(1,)](x)
try:
    broken_kernel[(1,)](x)
except CompilationError:
    print("told by its launch")
"""


def test_each_form_is_compiled_once_nothing_runs_and_errors_wait_for_the_launch(tmp_path: Path) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    script = tmp_path / "compile.py"  # Triton reads the source of what it compiles
    script.write_text(COMPILE)
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True", "['CompiledKernel', 'CompiledKernel'] True", "told by its launch"]
    assert list(tmp_path.rglob("*.cubin")), "the next start finds what was compiled"


def test_where_kernels_are_interpreted_nothing_is_compiled() -> None:
    with compile_side_by_side(2) as is_possible:
        assert not is_possible
