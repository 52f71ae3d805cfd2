"""Tensors that say they are on a GPU and keep their numbers in host memory, under a GPU's rules.

Operations that mix devices are refused, what makes the host wait is noted, and while a capture is open whatever a
device could not capture is refused and the rest recorded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tests.fakes.cuda.streams import Streams
from tests.fakes.recorded_graphs import UNINITIALISED, HostWait, host_waits, own_memory, tensors_in

_aten: Any = torch.ops.aten
DEVICE = torch.device("cuda:0")

_MAY_MIX = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_}
_PRODUCT_ROOT = "pagefleet_"


class MixedDevices(AssertionError):
    """One call with tensors of the host and of the device."""


@dataclass(frozen=True)
class Wait:
    """The host waited for the device."""

    reason: str
    callers: tuple[str, ...]
    """Qualified names of the product's functions on the stack, innermost first."""


class Recorder(Protocol):
    """Takes what a capture sees."""

    def add(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """An operation on numbers; `results` have memory of their own."""
        ...


class DeviceTensor(torch.Tensor):
    """One tensor of the device."""

    numbers: Tensor
    memory: DeviceMemory

    @staticmethod
    def __new__(cls, numbers: Tensor, memory: DeviceMemory) -> DeviceTensor:
        with torch._C._InferenceMode(False):  # a view made within that mode belongs to what it is a view of
            made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
                cls,
                numbers.shape,
                strides=numbers.stride(),
                storage_offset=numbers.storage_offset(),
                dtype=numbers.dtype,
                device=DEVICE,
            )
        made.numbers, made.memory = numbers, memory
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None  # most often, and then nothing else is looked through
        if not isinstance(first, DeviceTensor):
            first = next(each for each in tensors_in((args, kwargs or {})) if isinstance(each, DeviceTensor))
        return first.memory.run(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.numbers!r})"

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()


class DeviceMemory:
    """Runs operations as the device would, and notes what they cost the host."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.num_operations = 0
        self.capture: Recorder | None = None
        self.clears_memory = True
        """Fresh memory is zero rather than whatever it holds."""
        self.streams = Streams()
        self._pinned: dict[int, Tensor] = {}
        self._mode = _Mode(self)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it torch makes tensors on the device where the calling thread asks it to."""
        before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=...): made on the host, then sent
        try:
            with _Mode(self):
                yield
        finally:
            torch._C._set_only_lift_cpu_tensors(before)

    def wait(self, reason: str) -> None:
        """Note that the host waits; raises HostWait while a capture is open."""
        if self.capture is not None:
            raise HostWait(f"{reason} while a graph is captured")
        self.waits.append(Wait(reason, product_callers()))

    def pin(self, tensor: Tensor) -> Tensor:
        """Count the memory of a host tensor as pinned; it lives as long as this device."""
        self._pinned[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether `pin` had it, or what it is a view of."""
        return not isinstance(tensor, DeviceTensor) and tensor.untyped_storage()._cdata in self._pinned

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operation, as torch's dispatcher hands it over."""
        packet = func.overloadpacket
        if packet is _aten.is_pinned:
            return self.is_pinned(args[0])
        if packet in (_aten.pin_memory, _aten._pin_memory):
            return self.pin(args[0].clone())
        if _nature(func).has_parts:  # within inference mode torch leaves it to us to take an operation apart
            with self._mode:
                return func.decompose(*args, **kwargs)
        if packet is _aten._to_copy:
            return self._convert(func, args, kwargs)
        if packet is _aten.copy_:
            return self._copy(func, args, kwargs)
        return self._compute(func, args, dict(kwargs))

    def _convert(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        source, to = args[0], kwargs.get("device") or args[0].device
        self._check_copy(source, _is_gpu(to), source, kwargs.get("non_blocking", False))
        others = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking")}
        found: Tensor = func(_numbers(source), **others)
        self.launched(reads=[source], fresh=[found])
        if not _is_gpu(to):
            return found
        self._note(func, ((_numbers(source),), others), [found])
        return DeviceTensor(found, self)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        target, source = args[:2]
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        host = target if isinstance(source, DeviceTensor) else source
        self._check_copy(source, isinstance(target, DeviceTensor), host, non_blocking)
        numbers = _numbers(target), _numbers(source)
        func(*numbers)
        self.launched(reads=[source], writes=[target])
        if isinstance(target, DeviceTensor):
            self._note(func, (numbers, {}), [])
        return target  # type: ignore[no-any-return]

    def _check_copy(self, source: Tensor, to_device: bool, host: Tensor, non_blocking: bool) -> None:
        """A copy between the two sides waits unless the host's side is pinned and it is told not to."""
        if isinstance(source, DeviceTensor) == to_device or (non_blocking and self.is_pinned(host)):
            return
        self.wait("copy to the device" if to_device else "copy to the host")

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = tensors_in((args, kwargs))
        on_device = [each for each in tensors if isinstance(each, DeviceTensor)]
        packet, pinned, device = func.overloadpacket, kwargs.pop("pin_memory", None), kwargs.get("device")
        if on_device:
            self._check(func, args, kwargs, tensors)
        goes_to_device = bool(on_device) if device is None else _is_gpu(device)
        if device is not None and goes_to_device:
            kwargs["device"] = torch.device("cpu")
        numbers = _all_numbers((args, kwargs))
        found = (
            _scaled_product(*numbers[0], **numbers[1])
            if packet is _aten._scaled_mm
            else func(*numbers[0], **numbers[1])
        )
        if self.clears_memory and _nature(func).is_uninitialised:
            found.zero_()
        if pinned:
            self.pin(found)
        fresh = own_memory(tensors_in(found), numbers)
        writes = [each for each in _nature(func).written(args, kwargs) if isinstance(each, DeviceTensor)]
        if fresh or writes:  # else it is a view
            self.launched(reads=on_device, writes=writes, fresh=fresh)
        if not goes_to_device:
            return found
        self._note(func, numbers, fresh)
        same = {id(each.numbers): each for each in on_device}

        def on_gpu(each: Tensor) -> Tensor:
            return same[id(each)] if id(each) in same else DeviceTensor(each, self)

        return on_gpu(found) if isinstance(found, Tensor) else tree_map_only(Tensor, on_gpu, found)

    def launched(self, *, reads: Sequence[Any] = (), writes: Sequence[Any] = (), fresh: Sequence[Tensor] = ()) -> None:
        """Work on the calling thread's stream; of what is given tensors of the device count, and `fresh` numbers."""
        read, written = ([each.numbers for each in some if isinstance(each, DeviceTensor)] for some in (reads, writes))
        if read or written or fresh:
            self.streams.launch(read, written, fresh)

    def _check(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        packet = func.overloadpacket
        if packet is not _aten.allclose and host_waits(func, args, kwargs):  # that waits by what it is made of
            self.wait(str(packet))
        strangers = [each for each in tensors if not isinstance(each, DeviceTensor) and each.dim() > 0]
        if not strangers:
            return
        if packet in _MAY_MIX:
            self.wait("indices are copied to the device")
            return
        shapes = [tuple(each.shape) for each in strangers]
        raise MixedDevices(f"{func} got tensors of the device and of the host ({shapes}) in {product_callers()}")

    def _note(self, func: Any, given: tuple[Any, Any], fresh: list[Tensor]) -> None:
        """`given`: arguments, with numbers; `fresh`: results with memory of their own."""
        nature = _nature(func)
        is_view = not fresh and not nature.is_mutable
        if is_view or nature.is_uninitialised:
            return
        self.num_operations += 1
        if self.capture is not None:
            run = _scaled_product if func.overloadpacket is _aten._scaled_mm else func
            self.capture.add(run, given[0], given[1], fresh)


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Also sees operations without a tensor of the device."""

    def __init__(self, memory: DeviceMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._memory.run(func, args, kwargs or {})


def product_callers() -> tuple[str, ...]:
    """Functions of the product on this thread's stack, innermost first."""
    names = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_PRODUCT_ROOT):
            names.append(f"{module}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return tuple(names)


@dataclass(frozen=True)
class _Nature:
    """What torch says of an operation, which it takes its time to."""

    has_parts: bool
    """Whether it is made of others."""
    is_mutable: bool
    is_uninitialised: bool
    writes: tuple[tuple[int, str], ...]
    """Place and name of each argument that it writes to."""

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors among its arguments that it writes to."""
        return tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in self.writes])


@cache
def _nature(func: Any) -> _Nature:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    arguments = enumerate(func._schema.arguments)
    return _Nature(
        composite in func.py_kernels or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite),
        func._schema.is_mutable,
        func.overloadpacket._qualified_op_name.removeprefix("aten::") in UNINITIALISED,
        tuple((at, each.name) for at, each in arguments if each.alias_info is not None and each.alias_info.is_write),
    )


def _is_gpu(device: torch.device) -> bool:
    """Where a device has no number torch asks its guard for one, and gets that of meta tensors (`runtime`)."""
    return device.type in ("cuda", "meta")


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, DeviceTensor) else tensor


def _all_numbers(value: Any) -> Any:
    """Arguments with the numbers of their tensors; see `tensors_in`."""
    if isinstance(value, DeviceTensor):
        return value.numbers
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_all_numbers(each) for each in value])
    if kind is dict:
        return {name: _all_numbers(each) for name, each in value.items()}
    return value


def _scaled_product(
    x: Tensor,
    weight: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """What `torch._scaled_mm` computes, which a CPU cannot for every kind of scale."""
    sums = (x.float() @ weight.float()) * scale_a * scale_b
    return (sums if bias is None else sums + bias.float()).to(out_dtype or x.dtype)
