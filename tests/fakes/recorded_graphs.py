"""CUDA graphs on a CPU: operations are recorded while a capture is open, and done again, into the same memory, later.

As unforgiving as a device. Work that makes the host wait, or that brings numbers from the host, raises `HostWait`
while a capture is open. All graphs share one pool in the worst way that a pool may: whatever a replay may overwrite,
because its graph took the memory over from a tensor that had ended or hands it on to a later graph, it fills with NaN.

Unlike a device, work is also done while it is captured, and nothing is noticed of code that runs outside of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pagefleet_kernels.native.recording import depends_on_numbers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_aten: Any = torch.ops.aten

HOST_READS = {"tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__", "__array__"}
UNINITIALISED = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"}


class HostWait(AssertionError):
    """Something that a device cannot capture."""


@dataclass
class Operation:
    """One call that a graph does again."""

    func: Any
    args: Any
    kwargs: Any
    results: list[Tensor]
    """Results that have memory of their own; others are views of, or written to, what was there."""

    def repeat(self) -> None:
        """Do it again, into the same memory."""
        found = self.func(*self.args, **self.kwargs)
        fresh = tensors_in(found)
        for result, again in zip(self.results, own_memory(fresh, (self.args, self.kwargs)), strict=True):
            result.copy_(again)


@dataclass
class _Block:
    """Memory of the pool."""

    storage: torch.UntypedStorage
    made_by: int
    """Number of the capture that was open."""
    held: int
    """References of the recording itself."""
    ended_by: int | None = None
    """First capture at whose end nobody else referred to it."""

    def may_be_overwritten_by(self, graph: int) -> bool:
        """A graph overwrites what had ended when its capture did, and what took over memory that it let go."""
        return self.made_by > graph or (self.ended_by is not None and self.ended_by <= graph)


class RecordedGraphs:
    """Implements `DeviceGraphs`."""

    def __init__(self) -> None:
        self.blocks: dict[int, _Block] = {}
        self.num_replays = 0
        self._num_captures = 0
        self._in_session = False
        self._open: _Recorder | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """See DeviceGraphs."""
        self._in_session = True
        try:
            yield
        finally:
            self._in_session = False

    def begin(self) -> None:
        """See DeviceGraphs."""
        assert self._in_session, "captures are made within a session"
        assert self._open is None, "captures do not nest"
        self._open = _Recorder(self.blocks, self._num_captures)
        self._num_captures += 1
        self._open.start()

    def end(self) -> RecordedGraph:
        """See DeviceGraphs."""
        recorder, self._open = self._open, None
        assert recorder is not None, "no capture is open"
        recorder.stop()
        for block in self.blocks.values():
            if block.ended_by is None and not _is_used(block):
                block.ended_by = recorder.number
        return RecordedGraph(self, recorder.number, recorder.operations)

    def abandon(self) -> None:
        """See DeviceGraphs."""
        recorder, self._open = self._open, None
        if recorder is not None:
            recorder.stop()

    def memory_used(self) -> int:
        """Bytes of all tensors that captures made; nothing is shared here."""
        return sum(block.storage.nbytes() for block in self.blocks.values())


class RecordedGraph:
    """Implements `DeviceGraph`."""

    def __init__(self, owner: RecordedGraphs, number: int, operations: list[Operation]) -> None:
        self._owner = owner
        self._number = number
        self.operations = operations

    def replay(self) -> None:
        """Do the operations again, then spoil what a shared pool would not have kept."""
        self._owner.num_replays += 1
        for operation in self.operations:
            operation.repeat()
        for block in self._owner.blocks.values():
            if block.may_be_overwritten_by(self._number):
                torch.tensor([], dtype=torch.uint8).set_(block.storage).fill_(0xFF)  # NaN in every floating type


class _Recorder:
    def __init__(self, blocks: dict[int, _Block], number: int) -> None:
        self.number = number
        self.operations: list[Operation] = []
        self._blocks = blocks
        self._modes = (_DispatchRecorder(self.add), _HostReads())

    def start(self) -> None:
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def add(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        results = tensors_in(found)
        own = own_memory(results, (args, kwargs))
        for result in own:
            storage = result.untyped_storage()
            self._blocks[storage._cdata] = _Block(storage, self.number, held=1)
        is_view = not own and not func._schema.is_mutable
        if is_view or func.overloadpacket._qualified_op_name.removeprefix("aten::") in UNINITIALISED:
            return  # nothing to do again
        kept_args, kept_kwargs = tree_map_only(Tensor, self._keep, (args, kwargs))
        self.operations.append(Operation(func, kept_args, kept_kwargs, [self._keep(result) for result in own]))

    def _keep(self, tensor: Tensor) -> Tensor:
        """The same memory by a reference that is counted as the recording's."""
        if tensor.layout is not torch.strided:
            return tensor
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return tensor  # from outside of the pool: weights, buffers
        block.held += 1
        return tensor.detach()


class _DispatchRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, add: Callable[[Any, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add = add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_made_of_numbers = func is _aten.lift_fresh.default  # of Python: on a device a copy from the host
        if is_made_of_numbers or host_waits(func, args, kwargs):
            raise HostWait(f"{func} makes the host wait, or brings its numbers, while a graph is captured")
        found = func(*args, **kwargs)
        self._add(func, args, kwargs, found)
        return found


class _HostReads(TorchFunctionMode):
    """Reading a CPU tensor needs no operation, so it is noticed at the method."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in HOST_READS:
            raise HostWait(f"Tensor.{func.__name__} reads from the device while a graph is captured")
        return func(*args, **(kwargs or {}))


def host_waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operation ends on a device only when the host has seen what tensors there hold."""
    if func in (_aten.repeat_interleave.Tensor, _aten.repeat_interleave.self_Tensor):
        return kwargs.get("output_size") is None
    if func.overloadpacket in (_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return depends_on_numbers(func)


def tensors_in(value: Any) -> list[Tensor]:
    """Those among an operation's arguments or results, in order; torch's own way takes ten times as long."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for each in value for tensor in tensors_in(each)]


def own_memory(results: list[Tensor], inputs: Any) -> list[Tensor]:
    """Those results whose memory is none of the inputs'."""
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in(inputs) if tensor.layout is torch.strided}
    return [result for result in results if result.untyped_storage()._cdata not in given]


def _is_used(block: _Block) -> bool:
    """Whether any tensor but the recording's refers to the memory."""
    counted: int = torch._C._storage_Use_Count(block.storage._cdata)
    return counted > block.held
