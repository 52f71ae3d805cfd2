"""A computation on a CPU, noted as it is done, and done again over the same memory with no Python between kernels.

It is what a CUDA graph is on a GPU: whatever Python decides along the way is decided once, and what differs from run to
run must be in tensors that stay where they are. Calls of compiled kernels that follow each other become one call;
operations of torch are done one by one.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, addressof, c_float, c_int32, c_int64
from functools import partial
from math import prod
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pagefleet_kernels.native.library import CALLS, Call, Library

_ALIGNMENT = 64
_ATEN = torch.ops.aten
_NEW_MEMORY = {_ATEN.empty.memory_format, _ATEN.new_empty.default, _ATEN.empty_like.default}
_PEEKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


class CannotRecordError(Exception):
    """What was to be recorded does not do the same each time, or needs too much memory; the text says which."""


class RecordingMemory:
    """Memory for what recordings compute meanwhile, shared by all: only one of them runs at a time.

    A place is given out again when nobody has the tensor any more that had it, so that a layer works in the memory of
    the one before, which caches hold.
    """

    def __init__(self, num_bytes: int) -> None:
        """The system gives what is used of so many bytes."""
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._live: list[tuple[int, int, ref[torch.UntypedStorage]]] = []
        """From and to where, in order."""

    def like(self, x: Tensor) -> Tensor:
        """A tensor of x's shape and dtype, contiguous. Raises CannotRecordError where no place is left."""
        count = prod(x.shape)
        if not count:
            return torch.empty_like(x)
        size = -(-count * x.itemsize // _ALIGNMENT) * _ALIGNMENT
        self._live = [place for place in self._live if place[2]() is not None]
        start, before = 0, 0
        for first, end, _ in self._live:
            if first - start >= size:
                break
            start, before = end, before + 1
        if start + size > len(self._memory):
            raise CannotRecordError(f"it needs more than {len(self._memory) >> 20} MiB at once")
        tensor = torch.frombuffer(self._memory, dtype=x.dtype, count=count, offset=start).view(x.shape)
        self._live.insert(before, (start, start + size, ref(tensor.untyped_storage())))
        return tensor


class Recording:
    """What was computed once, and its result."""

    __slots__ = ("_kept", "_parts", "result")

    def __init__(self, library: Library, memory: RecordingMemory, compute: Callable[[], Tensor]) -> None:
        """Calls `compute`, and notes what the calling thread does there with `library` and with torch.

        Raises:
            CannotRecordError: see there; what was computed until then has been done.
        """
        notes = _Notes()
        with _library_noted(library, notes), _Peeks(), _Operations(notes, memory):
            result = compute()
        self.result = result
        """Its memory is written by each run."""
        self._kept = notes.kept
        self._parts = tuple(notes.parts(library))

    def run(self) -> Tensor:
        """Compute again, over what the tensors hold by now that were there before; the result."""
        for part in self._parts:
            part()
        return self.result


class _Notes:
    """What was done, in order: calls of the library, or a function that does an operation of torch again."""

    def __init__(self) -> None:
        self.done: list[Call | Callable[[], object]] = []
        self.kept: list[object] = []
        """That calls point to; but tensors are in a RecordingMemory, or kept by torch's operations."""

    def call(self, function: int, kinds: tuple[type, ...], arguments: tuple[Any, ...]) -> None:
        """Note a call of one of CALLS with arguments of these kinds."""
        call, counts, strides, pointers = Call(function=function), 0, 0, 0
        for kind, argument in zip(kinds, arguments, strict=True):
            if kind is c_int32:
                call.counts[counts] = argument
                counts += 1
            elif kind is c_int64:
                call.strides[strides] = argument
                strides += 1
            elif kind is c_float:
                call.number = argument
            else:
                call.at[pointers] = self._address(argument)
                pointers += 1
        self.done.append(call)

    def parts(self, library: Library) -> Iterator[Callable[[], object]]:
        """The same, with calls that follow each other in one."""
        together: list[Call] = []
        for done in [*self.done, None]:
            if isinstance(done, Call):
                together.append(done)
                continue
            if together:
                yield partial(library.run_calls, (Call * len(together))(*together), len(together))
                together = []
            if done is not None:
                yield done

    def _address(self, argument: Any) -> int | None:
        if argument is None or isinstance(argument, int):
            return argument
        told = argument if isinstance(argument, Structure) else argument._obj  # of byref
        self.kept.append(told)
        return addressof(told)


@contextmanager
def _library_noted(library: Library, notes: _Notes) -> Iterator[None]:
    """Note what this thread calls; others may go on calling."""
    thread = get_ident()

    def noted(number: int, function: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if get_ident() == thread:
                notes.call(number, type(function)._argtypes_, arguments)
            return function(*arguments)

        return call

    functions = {name: getattr(library, name) for name in CALLS}
    for number, (name, function) in enumerate(functions.items()):
        setattr(library, name, noted(number, function))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(library, name, function)


class _Peeks(TorchFunctionMode):
    """Refuses what brings numbers to Python without an operation of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PEEKS:
            raise CannotRecordError(f"it looks at numbers, by {func.__name__}")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operations of torch, and has new memory be that of recordings."""

    def __init__(self, notes: _Notes, memory: RecordingMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes, self._memory = notes, memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to tell torch.compile to keep off, torch would import all of it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _differs(func):
            raise CannotRecordError(f"it does not do the same each time, by {func}")
        if func in _NEW_MEMORY:
            new = func(*args, **kwargs)
            return self._memory.like(new) if new.is_contiguous() else self._kept(new)
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        found = func(*args, **kwargs)
        schema = func._schema
        if func is _ATEN.lift_fresh.default:  # of numbers that Python has, which operations may change
            self._notes.done.append(partial(found.copy_, found.clone()))
        elif schema.is_mutable and torch.Tag.inplace_view not in func.tags:
            self._notes.done.append(partial(func, *args, **kwargs))
        elif not any(returned.alias_info for returned in schema.returns):
            self._notes.done.append(partial(_again, func, args, kwargs, found))
        return found

    def _kept(self, tensor: Tensor) -> Tensor:
        self._notes.kept.append(tensor)
        return tensor


def depends_on_numbers(func: Any) -> bool:
    """Whether the operation brings numbers to Python, or its result has another shape for other numbers."""
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _differs(func: Any) -> bool:
    """The same, or its result is drawn, or it is nobody's that we know."""
    is_drawn = torch.Tag.nondeterministic_seeded in func.tags
    return depends_on_numbers(func) or is_drawn or func.namespace not in ("aten", "mkldnn", "prims")


def _again(func: Any, args: Any, kwargs: Any, found: Any) -> None:
    """Do an operation, and put its results where those of the first time are."""
    results = func(*args, **kwargs)
    if isinstance(results, Tensor):
        found.copy_(results)
        return
    for old, new in zip(found, results, strict=True):
        if isinstance(old, Tensor):
            old.copy_(new)
