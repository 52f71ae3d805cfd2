"""The compiled kernels against plain loops, without torch: here, and on an Arm processor that QEMU makes believe."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from pagefleet_kernels.native.library import LIBRARY

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("native_driver.cpp")
ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64")


def native_build() -> ModuleType:
    """It is no part of the package."""
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "kernels" / "native_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def driver(folder: Path, compiler: str) -> Path:
    """Linked with the library that lies beside it."""
    build = native_build()
    command = [compiler, "-std=c++17", "-O1", "-fopenmp", f"-I{build.SOURCES}", str(DRIVER), build.LIBRARY.name]
    subprocess.run([*command, "-o", "driver", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed"], cwd=folder, check=True)
    return folder / "driver"


def sets(*command: str | Path) -> list[str]:
    """The instruction sets that were tried; fails with what is wrong."""
    waits = {"OMP_WAIT_POLICY": "PASSIVE"}  # two threads, of which neither spins while others have the processor
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | waits)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("g++") is None or not LIBRARY.exists(), reason="there is no C++ compiler")
def test_this_processor(tmp_path: Path) -> None:
    shutil.copy(LIBRARY, tmp_path)
    assert sets(driver(tmp_path, "g++"))[-1] == "plain"


@pytest.mark.nightly
@pytest.mark.skipif(None in map(shutil.which, ARM), reason=f"needs {' and '.join(ARM)}")
def test_arm_processors_with_and_without_products_of_bytes_and_of_bfloat16(tmp_path: Path) -> None:
    build = native_build()
    build.compile_library(tmp_path / build.LIBRARY.name, "aarch64", ARM[0])
    made = driver(tmp_path, ARM[0])
    for processor, found in (
        ("cortex-a57", ["plain"]),
        ("neoverse-n1", ["neon_dot", "plain"]),
        ("max", ["neon_bf16", "neon_dot", "plain"]),
    ):
        assert sets(ARM[1], "-L", "/usr/aarch64-linux-gnu", "-cpu", processor, made) == found
