"""Guards against code that would make the host wait for a device, for tests without one."""

from __future__ import annotations

from typing import Any

import torch
from pagefleet_kernels.native.recording import depends_on_numbers
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.recorded_graphs import HOST_READS


class NoHostRead(TorchFunctionMode):
    """Refuses to hand a tensor's numbers to the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in HOST_READS, f"{name}() makes the host wait"
        return func(*args, **(kwargs or {}))


class NoHostWait(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations whose result the host must see to go on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_index = func.overloadpacket is torch.ops.aten.index  # by a mask it waits: so do twins of kernels alone
        assert is_index or not depends_on_numbers(func), f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))
