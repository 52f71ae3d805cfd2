"""Triton's kernels on the make-believe device: in which form each would be compiled, and how often it is launched.

The form is worked out by Triton itself, from the arguments and the target: a launch whose form was not there before is
one that a GPU would wait for the compiler with. Where numbers are wanted Triton's interpreter runs the kernel.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pagefleet_kernels
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelParam, create_function_from_signature

from tests.fakes.cuda.runtime import Capture, Launched
from tests.fakes.cuda.tensors import DeviceMemory, DeviceTensor, MixedDevices, product_callers

_NOT_INTERPRETED = {"NATIVE": False, "NATIVE_FP8": False}
"""Constants under which a kernel does by arithmetic what the interpreter has no instruction for."""


@dataclass(frozen=True)
class Form:
    """One compilation of a kernel."""

    kernel: str
    facts: frozenset[tuple[str, str]]
    """Each argument and option, with what Triton compiles anew for when it changes."""

    def difference(self, others: Iterable[Form]) -> str:
        """What sets it apart from the nearest of the other forms of its kernel."""
        nearest = min(
            (form.facts for form in others if form.kernel == self.kernel),
            key=lambda facts: len(facts - self.facts),
            default=frozenset[tuple[str, str]](),
        )
        return f"{sorted(self.facts - nearest)} instead of {sorted(nearest - self.facts)}"


class Launches:
    """What was launched, in which forms."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.forms: dict[Form, tuple[str, ...]] = {}
        """With the product's functions that asked for each first."""
        self.runs_kernels = False
        """Whether launches compute; otherwise they are only noted."""

    def note(self, form: Form, run: Callable[[], None]) -> None:
        """One launch."""
        if form not in self.forms:
            self.forms[form] = product_callers()
        self.memory.num_operations += 1
        if isinstance(capture := self.memory.capture, Capture):
            capture.launched.append(Launched(form.kernel, run))
        run()


class KernelStandIn:
    """Takes the place of one Triton function in the module that launches it."""

    def __init__(self, kernel: InterpretedFunction, launches: Launches, capability: int) -> None:
        self._kernel, self._launches = kernel, launches
        self._name = kernel.fn.__name__
        signature = inspect.signature(kernel.fn)
        varies = set(kernel.kwargs.get("do_not_specialize") or ())
        parameters = [
            KernelParam(place, parameter, parameter.name in varies, False)
            for place, parameter in enumerate(signature.parameters.values())
        ]
        self._constants = [parameter.name for parameter in parameters if parameter.is_constexpr]
        backend = make_backend(GPUTarget("cuda", capability, 32))
        self._specialize = create_function_from_signature(signature, parameters, backend)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            for place, value in enumerate(args):
                if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
                    raise MixedDevices(f"argument {place} of {self._name} is on the host, in {product_callers()}")
            numbers = tuple(each.numbers if isinstance(each, DeviceTensor) else each for each in args)
            values, kinds, options = self._specialize(*numbers, **kwargs)
            facts = [
                *zip(values, map(str, kinds), strict=True),
                *((name, str(value)) for name, value in options.items()),
            ]
            self._launches.memory.launched(writes=args)
            constants = [(name, str(values[name])) for name in self._constants]
            form = Form(self._name, frozenset(facts + constants))
            self._launches.note(form, lambda: self._run(grid, numbers, kwargs))

        return launch

    def _run(self, grid: tuple[int, ...], numbers: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._launches.runs_kernels and all(grid):
            changed = {name: value for name, value in _NOT_INTERPRETED.items() if name in kwargs}
            self._kernel[grid](*numbers, **(kwargs | changed))


def kernel_stand_ins(launches: Launches, capability: int) -> ExitStack:
    """Put stand-ins for all kernels into the modules that launch them, for as long as the stack is open."""
    stack = ExitStack()
    for found in pkgutil.iter_modules(pagefleet_kernels.__path__):
        module = importlib.import_module(f"pagefleet_kernels.{found.name}")
        for name, value in list(vars(module).items()):
            if name.endswith("_kernel") and isinstance(value, InterpretedFunction):
                stack.enter_context(mock.patch.object(module, name, KernelStandIn(value, launches, capability)))
    return stack
