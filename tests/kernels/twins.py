"""Compiled kernels with AMX's instructions by what they are said to do, for processors without them."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.kernels.test_native_machines import native_build

HERE = Path(__file__).parent
TILES = f'-DTILES="{HERE / "tile_twin.h"}"'


def compile_twin(folder: Path, units: Sequence[tuple[str, Sequence[str]]], *flags: str) -> ctypes.CDLL:
    """One library of some of the kernels' files, each with flags of its own."""
    build, made = native_build(), folder / "twin.so"
    objects = [str(folder / f"{nth}.o") for nth in range(len(units))]
    for (source, own), to in zip(units, objects, strict=True):
        command = ["g++", *build.OPTIONS, *flags, *own, *build.KERNELS[source], "-I.", "-c", f"{source}.cpp", "-o", to]
        subprocess.run(command, cwd=build.SOURCES, check=True)
    subprocess.run(["g++", "-shared", *objects, "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))
