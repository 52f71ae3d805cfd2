"""Triton's interpreter without what it looks up again at each call of each function: a third of its time. A plug-in.

Before a kernel, and before every function that the kernel calls, it goes through all names of `triton.language` for
those that it has to put others in the place of; and of each result it asks a table, made anew, for numpy's type.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from types import ModuleType
from typing import Any


def pytest_collection_finish() -> None:
    """Have it look each up once; nothing to do where Triton was not imported, compiles, or is another version."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None or os.environ.get("TRITON_INTERPRET") != "1":
        return
    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):
        _look_for_builtins_once(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        _name_types_once(interpreter)


def _look_for_builtins_once(interpreter: ModuleType) -> None:
    is_builtin, patch = interpreter.tl.core.is_builtin, interpreter._patch_attr

    @functools.cache
    def builtins(owner: Any) -> list[tuple[str, Any]]:
        """As they are before the first kernel runs: later they are replaced, or are as before."""
        return [(name, member) for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch_builtin(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(owner):
            if getattr(owner, name) is member:  # not within another kernel, which has done this
                patch(owner, name, member, builder, scope)

    vars(interpreter)["_patch_builtin"] = patch_builtin


def _name_types_once(interpreter: ModuleType) -> None:
    language, ask = interpreter.tl, interpreter._get_np_dtype
    of_scalar = functools.cache(ask)

    def numpy_type(kind: Any) -> Any:
        element = kind.element_ty if isinstance(kind, language.block_type) else kind
        return ask(element) if isinstance(element, language.pointer_type) else of_scalar(element)

    vars(interpreter)["_get_np_dtype"] = numpy_type
