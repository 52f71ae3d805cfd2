"""Compiles the kernels of the CPU when a wheel is made or the folder is installed editable; also by itself.

A plain C library that takes OpenMP from the process it is loaded into, torch's own: so one file serves every Python and
every torch. Without a compiler the distribution is made without it, and torch computes instead. PAGEFLEET_NATIVE=off
leaves it out, PAGEFLEET_NATIVE=required fails where it cannot be made. CXX names another compiler.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by itself
    BuildHookInterface = object  # type: ignore[assignment,misc]

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARY = HERE / "pagefleet_kernels" / "native" / "libpagefleet_kernels.so"

OPTIONS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-fvisibility=default",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", *_AVX2)
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx512_amx": (*_BF16, '-DTILES="tiles.h"', "-DVECTORS=avx512_bf16"),
        "avx512_bf16": (*_BF16, "-DTILED=avx512_amx"),
        "avx512_vnni": _VNNI,
        "avx512": _AVX512,
        "avx2": _AVX2,
    },
    "aarch64": {"neon_bf16": ("-march=armv8.2-a+dotprod+bf16",), "neon_dot": ("-march=armv8.2-a+dotprod",)},
}
"""Of each kind of processor, and the compiler's options for each; `plain` is what every one of the kind has."""
KERNELS: dict[str, tuple[str, ...]] = {
    "attention": (),
    # Floats are torch's, which rounds a product before it is added.
    "blocks": ("-ffp-contract=off",),
    "dense": (),
    "experts": (),
    "layers": (),
    "quantized": (),
    "quantized_experts": (),
    "sampling": (),
    # What else it keeps in registers leaves too few for a tile of sums: with AVX-512 half as fast.
    "strips": ("-fno-tree-pre", "-fno-gcse"),
}
"""The files that are compiled for each of them, and more options."""
ONLY: dict[str, tuple[str, ...]] = {"avx512_amx": ("quantized", "quantized_experts", "strips")}
"""Sets that have but some of the files; the next one has the others."""


class CannotCompile(Exception):
    """There is no compiler, or it failed; the text says why."""


def compile_library(target: Path = LIBRARY, machine: str | None = None, compiler: str | None = None) -> None:
    """Compile every source for every instruction set into one library. Raises CannotCompile.

    `machine`: the kind of processor, this one unless given, and the `compiler` that compiles for it.
    """
    if sys.platform != "linux":
        raise CannotCompile(f"the compiled kernels are for Linux, not for {sys.platform}")
    names = (compiler,) if compiler else (os.environ.get("CXX") or "g++", "c++")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise CannotCompile("no C++ compiler was found")
    sets = {**INSTRUCTION_SETS.get(machine or platform.machine(), {}), "plain": ()}
    units = {name: [f"{name}.cpp"] for name in ("dispatch", "calls", "routing")}
    for (kernel, more), (name, flags) in itertools.product(KERNELS.items(), sets.items()):
        if kernel in ONLY.get(name, KERNELS):
            units[f"{kernel}_{name}"] = [f"-DISA={name}", *flags, *more, f"{kernel}.cpp"]
    target.parent.mkdir(exist_ok=True)
    # Beside the target, so that it is replaced at once: others may be loading it.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = [f"{folder}/{name}.o" for name in units]
        list(threads.map(lambda unit, out: _run(compiler, *OPTIONS, "-c", *unit, "-o", out), units.values(), objects))
        # Without -fopenmp: its functions are found in the process, where torch has brought them.
        made = f"{folder}/{target.name}"
        _run(compiler, "-shared", "-s", *objects, "-o", made)
        if b"__kmpc_" in Path(made).read_bytes():
            raise CannotCompile(f"{compiler} calls LLVM's OpenMP, and torch brings GNU's: have CXX name g++")
        os.replace(made, target)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SOURCES)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise CannotCompile(f"{' '.join(command)} failed: {lines[0] if lines else done.returncode}")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Hatchling's hook: into the folder itself where that is installed editable, else into the wheel alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and have the wheel say what it is for."""
        is_editable, wish = version == "editable", os.environ.get("PAGEFLEET_NATIVE", "auto")
        self._folder = tempfile.TemporaryDirectory()
        library = LIBRARY if is_editable else Path(self._folder.name) / LIBRARY.name
        try:
            if wish == "off":
                raise CannotCompile("PAGEFLEET_NATIVE is off")
            compile_library(library)
        except CannotCompile as error:
            library.unlink(missing_ok=True)
            if wish == "required":
                raise
            print(f"pagefleet-kernels without compiled kernels, so torch computes on a CPU: {error}", file=sys.stderr)
            return
        if not is_editable:
            build_data["pure_python"] = False
            # It asks of glibc memcpy, memset and syscall alone.
            system = "manylinux_2_17" if platform.libc_ver()[0] == "glibc" else "linux"
            build_data["tag"] = f"py3-none-{system}_{platform.machine()}"
            build_data["force_include"][str(library)] = str(LIBRARY.relative_to(HERE))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Drop what the wheel has by now."""
        self._folder.cleanup()


if __name__ == "__main__":
    try:
        compile_library()
    except CannotCompile as error:
        sys.exit(f"error: {error}")
