"""NCCL with one rank that sends to itself: binding, streams and non-blocking calls without a second device."""

from __future__ import annotations

import ctypes
import multiprocessing
import queue
import time
from multiprocessing.queues import Queue
from typing import Any

import torch
from pagefleet_kv.p2p.planes.nccl.library import (
    NcclError,
    NcclFunctions,
    State,
    UniqueId,
    find_nccl,
    two_rank_config,
)

NUM_BYTES = 16 << 20
_UINT8 = 1


def send_to_self(seconds: float) -> dict[str, Any]:
    """Return whether bytes that were sent and received in one group are the same, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    results: Queue[dict[str, Any]] = context.Queue()
    process = context.Process(target=_run, args=(results, seconds), daemon=True)
    process.start()
    try:
        return results.get(timeout=seconds)
    except queue.Empty:
        return {"ok": False, "why": f"not done within {seconds:g} s"}
    finally:
        process.join(2)
        process.kill()


def _run(results: Queue[dict[str, Any]], seconds: float) -> None:
    try:
        results.put(_send(time.monotonic() + seconds))
    except (NcclError, RuntimeError) as error:
        results.put({"ok": False, "why": str(error)})


def _send(deadline: float) -> dict[str, Any]:
    torch.cuda.set_device(0)
    nccl, raw = NcclFunctions(find_nccl()), ctypes.CDLL(find_nccl())
    sent = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda")
    received = torch.zeros_like(sent)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    handle, config = ctypes.c_void_p(), two_rank_config("kv to itself", 2)
    unique_id = UniqueId.from_buffer_copy(nccl.unique_id())
    raw.ncclCommInitRankConfig(ctypes.byref(handle), 1, unique_id, 0, ctypes.byref(config))
    if handle.value is None:
        raise NcclError("ncclCommInitRankConfig gave no communicator")
    _until_ready(nccl, handle.value, deadline)
    raw.ncclGroupStart()
    for call, buffer in ((raw.ncclSend, sent), (raw.ncclRecv, received)):
        call(
            ctypes.c_void_p(buffer.data_ptr()),
            ctypes.c_size_t(NUM_BYTES),
            _UINT8,
            0,
            handle,
            ctypes.c_void_p(stream.cuda_stream),
        )
    raw.ncclGroupEnd()
    _until_ready(nccl, handle.value, deadline)
    stream.synchronize()
    same = torch.equal(sent, received)
    nccl.abort(handle.value)
    return {"ok": same, "why": "" if same else "the bytes differ"}


def _until_ready(nccl: NcclFunctions, communicator: int, deadline: float) -> None:
    while nccl.state(communicator) is not State.READY:
        if time.monotonic() > deadline:
            raise NcclError("it does not get ready")
        time.sleep(0.001)
