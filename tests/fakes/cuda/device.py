"""A make-believe CUDA device, on which `LLM(device="cuda")` runs whole on a machine without a GPU.

Tensors say that they are on `cuda:0`, Triton's kernels are noted (or interpreted), graphs are recorded and replayed.
So it shows what reading cannot: devices mixed in one call, waits of the host and where, kernels that a GPU would
compile while it serves, launches of a layer, what a capture may not do. It says nothing about speed or memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from pagefleet_kernels import _triton
from pagefleet_kernels.dispatch import architecture

from tests.fakes.cuda.kernels import Form, Launches, kernel_stand_ins
from tests.fakes.cuda.runtime import GpuKind, Launched, cuda_stand_ins, device_guard, tensor_stand_ins
from tests.fakes.cuda.tensors import DeviceMemory, Wait


class FakeGpu:
    """What the device saw."""

    def __init__(self) -> None:
        self.memory = DeviceMemory()
        self.launches = Launches(self.memory)
        self.graphs: list[list[Launched]] = []
        """What each captured graph launches, in order."""
        self._known: set[Form] = set()

    def ready(self, *, computes: bool = False) -> None:
        """Loading is over: from here on waits and forms count. `computes`: kernels give numbers."""
        self._known = set(self.launches.forms)
        self.memory.waits.clear()
        self.launches.runs_kernels = computes

    @property
    def waits(self) -> list[Wait]:
        """Of the host for the device, since `ready`."""
        return self.memory.waits

    @property
    def late_forms(self) -> list[str]:
        """Kernels that a GPU would have compiled since `ready`, and who asked."""
        late = ((form, callers) for form, callers in self.launches.forms.items() if form not in self._known)
        return [f"{form.kernel}: {form.difference(self._known)}, from {callers[:6]}" for form, callers in late]


@contextmanager
def fake_gpu(kind: GpuKind | None = None) -> Iterator[FakeGpu]:
    """Within it torch has this GPU and no other; skips the test where that cannot be."""
    if torch.cuda.is_available():
        pytest.skip("the make-believe GPU is for machines without one")
    if not _triton.INTERPRETED:
        pytest.skip("the make-believe GPU needs Triton with TRITON_INTERPRET=1")
    kind, gpu = kind or GpuKind(), FakeGpu()
    with ExitStack() as stack:
        try:
            stack.enter_context(device_guard())
        except (OSError, ValueError) as error:
            pytest.skip(f"this build of torch cannot be told of a GPU that is not there: {error}")
        major, minor = kind.capability
        stack.enter_context(cuda_stand_ins(gpu.memory, kind, gpu.graphs))
        stack.enter_context(tensor_stand_ins(gpu.memory))
        stack.enter_context(kernel_stand_ins(gpu.launches, 10 * major + minor))
        stack.callback(architecture.cache_clear)
        architecture.cache_clear()
        stack.enter_context(gpu.memory.active())
        yield gpu
