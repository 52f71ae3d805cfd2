"""Adding up what several ranks computed, in one kernel, through memory of theirs that all of them reach.

Each rank puts its part into its own memory, writes the number of the round into that of all others, waits for theirs,
and adds up all parts in the order of the ranks, in float32: so each has the same bits. Programs of a kernel meet those
of their own number on the other ranks, and no others. What a rank gives to be read, `MEMORY_BYTES`:

    PROGRAMS lines of 16 int64:  0 to 7, per rank: the round of which its part is there | 8: rounds that are done |
                                 9: nanoseconds to wait for others
    2 x PROGRAMS slots of SLOT_BYTES, two sets that take turns

Who has heard all others in one round knows that they have read the parts of the round before: so it writes over these,
and ranks meet once a round. Rounds are counted on the device, so launches can be captured in a graph.

A rank that does not come in time leaves NaN, a note for the host, and a limit of 0: later rounds do not wait for it.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass

import torch

from pagefleet_kernels._triton import COMPILE_OPTIONS, INTERPRETED, jit, next_power_of_2, tl
from pagefleet_kernels.dispatch import Backend, choose_backend
from pagefleet_kernels.errors import BackendUnavailableError, UnsupportedShapeError

MAX_RANKS = 8
PROGRAMS = 64
SLOT_BYTES = 8192
MAX_BYTES = PROGRAMS * SLOT_BYTES
"""Of a message."""
_LINE = 16
_DONE, _LIMIT = MAX_RANKS, MAX_RANKS + 1
_HEAD_BYTES = PROGRAMS * _LINE * 8
MEMORY_BYTES = _HEAD_BYTES + 2 * MAX_BYTES
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """All ranks' memory, as one of them sees it; each begins as zeros.

    Attributes:
        index: of this rank.
        own: uint8 [MEMORY_BYTES], this rank's.
        addresses_R: int64, on the same device: where each rank's begins.
        late: int64 [1], which the host reads and the device writes: 1 + the number of a rank that did not come in
            time; 0: none.
    """

    index: int
    own: torch.Tensor
    addresses_R: torch.Tensor
    late: torch.Tensor

    def wait_at_most(self, seconds: float) -> None:
        """Set how long others are waited for in rounds to come."""
        _lines(self.own)[:, _LIMIT] = int(seconds * 1e9)


def sum_ranks_(x: torch.Tensor, memory: PeerMemory, *, backend: Backend | None = None) -> torch.Tensor:
    """Add up `x` over all ranks, in place; it is contiguous, of a type of DTYPES, and has at most MAX_BYTES.

    All ranks make the same calls in the same order, one after another. The twin takes memory of a CPU alone.
    """
    _check(x, memory)
    if not x.numel():
        return x
    if choose_backend(x.device, backend) == "torch":
        if not x.is_cpu:
            raise BackendUnavailableError("ranks on GPUs are added up by the Triton kernel: use backend='triton'")
        return _sum_ranks_by_torch(x, memory)
    unit = 16 if x.numel() % 16 == 0 else 1  # of what can be read at once
    num_ranks, block = len(memory.addresses_R), SLOT_BYTES // x.itemsize
    _sum_ranks_kernel[((x.numel() + block - 1) // block,)](
        x,
        memory.addresses_R,
        memory.late,
        x.numel() // unit,
        memory.index,
        UNIT=unit,
        RANKS=num_ranks,
        PADDED_RANKS=next_power_of_2(num_ranks),
        BLOCK=block,
        INTERPRETED=INTERPRETED,
        LINE=_LINE,
        DONE=_DONE,
        LIMIT=_LIMIT,
        PROGRAMS=PROGRAMS,
        num_warps=SLOT_BYTES // 16 // 32,  # 16 bytes of a thread
        **COMPILE_OPTIONS,
    )
    return x


def _check(x: torch.Tensor, memory: PeerMemory) -> None:
    if not x.is_contiguous() or x.dtype not in DTYPES or x.nbytes > MAX_BYTES:
        raise UnsupportedShapeError(
            f"what is added up over ranks must be contiguous, of a floating type of 16 or 32 bits, and {MAX_BYTES} "
            f"bytes at most, not {list(x.shape)} of {x.dtype} with strides {x.stride()}"
        )
    if not 0 <= memory.index < len(memory.addresses_R) <= MAX_RANKS:
        raise UnsupportedShapeError(f"rank {memory.index} of {len(memory.addresses_R)}: at most {MAX_RANKS} add up")


def _lines(memory: torch.Tensor) -> torch.Tensor:
    return memory[:_HEAD_BYTES].view(torch.int64).view(PROGRAMS, _LINE)


def _sum_ranks_by_torch(x: torch.Tensor, memory: PeerMemory) -> torch.Tensor:
    """Twin of `sum_ranks_`."""
    buffer = ctypes.c_uint8 * MEMORY_BYTES
    ranks = [
        torch.frombuffer(buffer.from_address(address), dtype=torch.uint8) for address in memory.addresses_R.tolist()
    ]
    lines, index = [_lines(rank) for rank in ranks], memory.index
    slots = [rank[_HEAD_BYTES:].view(2, PROGRAMS, SLOT_BYTES) for rank in ranks]
    for program, piece in enumerate(torch.split(x.view(-1), SLOT_BYTES // x.itemsize)):
        own = lines[index][program]
        number = int(own[_DONE]) + 1
        parts = [slot[number & 1, program, : piece.nbytes].view(x.dtype) for slot in slots]
        parts[index].copy_(piece)
        for line in lines:
            line[program, index] = number
        missing = _wait(own[: len(ranks)], number, int(own[_LIMIT]))
        piece.copy_(torch.stack(parts).float().sum(0))
        own[_DONE] = number
        if missing:
            piece.fill_(float("nan"))
            own[_LIMIT], memory.late[0] = 0, missing
    return x


def _wait(arrivals_R: torch.Tensor, number: int, limit_ns: int) -> int:
    """1 + the last rank that did not come in time; 0: all did."""
    until = time.monotonic_ns() + limit_ns
    while (late_R := arrivals_R < number).any():
        if time.monotonic_ns() >= until:
            return 1 + int(late_R.nonzero()[-1])
        time.sleep(0)  # the others may be threads of this process
    return 0


@jit()
def _now(waited, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Nanoseconds; the interpreter has no clock, and takes about as long as this for a look."""
    if INTERPRETED:
        return waited + 100_000
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@jit()
def _look(arrivals_ptr, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The numbers that ranks have written: what each wrote before its number can be read after it was seen here."""
    if INTERPRETED:
        return tl.load(arrivals_ptr)
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u64 $0, [$1];", "=l,l", [arrivals_ptr], dtype=tl.int64, is_pure=False, pack=1
    )


@jit()
def _tell(arrivals_ptr, number, INTERPRETED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the number to all: what this program wrote before can be read by who sees it. Not as an atomic operation,
    which PCIe need not know; one warp writes, as each has the whole of so few elements."""
    if INTERPRETED:
        tl.store(arrivals_ptr, number)
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.lt.u32 is_first, thread, 32;
            @is_first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [arrivals_ptr, number],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit()
def _slot(  # type: ignore[no-untyped-def]
    addresses_ptr, rank, turn, LINE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr
):
    """Where this program's part of a rank lies."""
    slots = tl.load(addresses_ptr + rank) + PROGRAMS * LINE * 8
    return tl.multiple_of(slots.to(tl.pointer_type(dtype)), 16) + (turn * PROGRAMS + tl.program_id(0)) * BLOCK


@jit(do_not_specialize=("num_units", "index"))
def _sum_ranks_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    addresses_ptr,
    late_ptr,
    num_units,
    index,
    UNIT: tl.constexpr,
    RANKS: tl.constexpr,
    PADDED_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    INTERPRETED: tl.constexpr,
    LINE: tl.constexpr,
    DONE: tl.constexpr,
    LIMIT: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """One program per slot."""
    program = tl.program_id(0)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    offset = tl.arange(0, BLOCK)
    mask = program * BLOCK + offset < num_units * UNIT
    own_ptr = tl.load(addresses_ptr + index).to(tl.pointer_type(tl.int64)) + program * LINE
    number, limit = tl.load(own_ptr + DONE) + 1, tl.load(own_ptr + LIMIT)
    turn = (number & 1).to(tl.int32)
    x = tl.load(x_ptr + program * BLOCK + offset, mask=mask, other=0.0)
    tl.store(_slot(addresses_ptr, index, turn, LINE, PROGRAMS, BLOCK, dtype) + offset, x, mask=mask)
    tl.debug_barrier()  # all threads' stores, before one of them says so
    rank = tl.arange(0, PADDED_RANKS)
    line_ptr = tl.load(addresses_ptr + rank, mask=rank < RANKS, other=0).to(tl.pointer_type(tl.int64)) + program * LINE
    there_ptr = tl.where(rank < RANKS, line_ptr + index, own_ptr + rank)  # ranks that are none come by themselves
    _tell(there_ptr, number + tl.zeros_like(rank), INTERPRETED)

    waited = tl.zeros((), tl.int64)
    began = _now(waited, INTERPRETED)
    seen = _look(own_ptr + rank, INTERPRETED)
    while (tl.min(seen, axis=0) < number) & (waited < limit):
        seen = _look(own_ptr + rank, INTERPRETED)
        waited = _now(waited, INTERPRETED) - (0 if INTERPRETED else began)
    missing = tl.max(tl.where(seen < number, rank + 1, 0), axis=0)
    missing = tl.max(tl.where(offset >= 0, missing, 0), axis=0)  # each warp has looked for itself
    tl.debug_barrier()  # what one thread saw, all may act on

    total = tl.zeros((BLOCK,), tl.float32)
    for each in tl.static_range(RANKS):
        part_ptr = _slot(addresses_ptr, each, turn, LINE, PROGRAMS, BLOCK, dtype)
        total += tl.load(part_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    total = tl.where(missing > 0, float("nan"), total)
    tl.store(x_ptr + program * BLOCK + offset, total.to(dtype), mask=mask)
    tl.store(own_ptr + DONE, number)
    if missing > 0:
        tl.store(own_ptr + LIMIT, tl.zeros((), tl.int64))
        tl.store(late_ptr, missing.to(tl.int64))
