"""Shared libraries through ctypes: where torch's packages have them, and their functions with the types they take."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path


def find_library(packages: Sequence[str], file_name: str) -> str:
    """Return the path of a library in the first package that has it, or its name, for the system's loader to find."""
    for package in packages:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = Path(folder) / "lib" / file_name
            if path.exists():
                return str(path)
    return file_name


def bind(
    library: ctypes.CDLL, name: str, arguments: Sequence[type], returns: type = ctypes.c_int
) -> ctypes._NamedFuncPointer:
    """Return a function of a library. Call this one: to ask the library again gives another, without types.

    Raises:
        AttributeError: the library has none of this name.
    """
    function = library[name]
    function.argtypes = arguments
    function.restype = returns
    return function
