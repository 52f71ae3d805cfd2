"""What only a GPU tells of K/V between engines: whether two processes on one device can use each data plane, how fast
it is there, and whether a prefill and a decode engine that share the device answer as one engine does.

python bench/gpu_kv_planes.py [--json FILE]       (without a GPU: says so, and tries the tcp plane on the CPU)

Each check runs in processes of its own and is ended when its time is over; the engines of all planes load side by
side. NCCL refuses two ranks on one device unless they seem to be on two hosts (NCCL_HOSTID) or, from 2.30,
NCCL_MULTI_RANK_GPU_ENABLE is set: both are tried. Between two processes that share a device by taking turns NCCL is
slow; that it is right is what counts here. What it says of itself goes into a file beside the report, and a check that
fails shows on stderr where its threads are.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import queue
import select
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from pagefleet_engine.worker.kv_pages import DevicePages, make_kv_pages
from pagefleet_kv.cuda_memory import CudaError, CudaSharedMemory, find_cudart
from pagefleet_kv.p2p.data_plane import (
    DataPlane,
    Frame,
    FrameArrived,
    FrameRefused,
    FrameSent,
    Landing,
    LinkDown,
    LinkUp,
    PlaneEvent,
    Tell,
)
from pagefleet_kv.p2p.planes.cuda_ipc import IpcCarriers
from pagefleet_kv.p2p.planes.device.copies import DeviceCopies
from pagefleet_kv.p2p.planes.device.plane import DevicePlane
from pagefleet_kv.p2p.planes.nccl.carrier import NcclCarriers
from pagefleet_kv.p2p.planes.nccl.library import (
    NcclError,
    NcclFunctions,
    State,
    UniqueId,
    find_nccl,
    two_rank_config,
    version_text,
)
from pagefleet_kv.p2p.planes.tcp.plane import TcpPlane

from bench.gpu_kv_engines import check_engines
from bench.report import write_report

BLOCK_BYTES = 512 * 1024
FRAME_BLOCKS = 8
NUM_SLOTS = 16
COMPATIBILITY = b"c" * 32
LINK_S, TURN_S, NCCL_TURN_S = 12.0, 10.0, 20.0
MULTI_RANK = 23000
"""NCCL's version, as it numbers them, from which two ranks may share a device."""
TOO_LITTLE_S = 3.0
ONE_HOST_EACH = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}

NUM_BYTES = 16 << 20
_UINT8 = 1  # as NCCL numbers types

Outcome = dict[str, Any]


class CheckFailed(Exception):
    """A check did not come to its end; the message says why."""


class End:
    """One process's end of a plane: its pool, and the words that go to the other by a queue."""

    def __init__(self, name: str, device: str, num_blocks: int, words: Connection) -> None:
        self._words = words
        self.pool = torch.zeros(num_blocks, BLOCK_BYTES, dtype=torch.uint8, device=device)
        self.plane = _plane(name, self.pool)
        self._seen: list[PlaneEvent] = []

    def wait_for(self, kind: type[PlaneEvent], count: int, seconds: float) -> None:
        """Go on until so many events of a kind have come, and drop all events."""
        deadline = time.monotonic() + seconds
        while (seen := sum(isinstance(event, kind) for event in self._seen)) < count:
            if time.monotonic() > deadline:
                faulthandler.dump_traceback()
                raise CheckFailed(f"{seen} of {count} {kind.__name__} within {seconds:g} s: {self.plane.counters()}")
            self.pump()
        self._seen.clear()

    def pump(self) -> None:
        """Pass words on, and take what happened."""
        select.select([self.plane.bell, self._words.fileno()], [], [], 0.1)
        for event in self.plane.events():
            if isinstance(event, Tell):
                self._words.send_bytes(event.data)
            elif isinstance(event, LinkDown | FrameRefused):
                raise CheckFailed(event.reason)
            else:
                self._seen.append(event)
        with contextlib.suppress(EOFError, ConnectionError):  # the other is done
            while self._words.poll():
                self.plane.hear("other", self._words.recv_bytes())


def _plane(name: str, pool: torch.Tensor) -> DataPlane:
    pages = make_kv_pages(pool)
    if name == "tcp":
        return TcpPlane(pages, COMPATIBILITY, "127.0.0.1", 0)
    assert isinstance(pages, DevicePages)
    copies = DeviceCopies(pages, FRAME_BLOCKS * BLOCK_BYTES)
    if name == "cuda_ipc":
        memory = CudaSharedMemory(find_cudart(torch.version.cuda))
        return DevicePlane(IpcCarriers(memory, copies), copies, COMPATIBILITY, (NUM_SLOTS, NUM_SLOTS))
    library = NcclFunctions(find_nccl())
    carriers = NcclCarriers(library, copies, 1, 1, NCCL_TURN_S, LINK_S)
    return DevicePlane(carriers, copies, COMPATIBILITY, (NUM_SLOTS, NUM_SLOTS), LINK_S, NCCL_TURN_S)


def _turn_s(name: str) -> float:
    return NCCL_TURN_S if name.startswith("nccl") else TURN_S


def transfer(turn: int) -> bytes:
    """Its id. A plane takes the same one again only after it has told that it forgot it."""
    return turn.to_bytes(16)


def content(num_blocks: int, device: str) -> torch.Tensor:
    """What the source's pool holds: the same in both processes."""
    words = torch.arange(num_blocks * BLOCK_BYTES // 8, dtype=torch.int64) * 0x9E3779B97F4A7C1
    return words.view(torch.uint8).view(num_blocks, BLOCK_BYTES).to(device)


def run_source(
    name: str, device: str, num_blocks: int, turns: int, words: Connection, queues: Mapping[str, Queue[Any]]
) -> None:
    """The process that sends."""
    turn_s = _turn_s(name)
    try:
        os.environ.update(_environment(name, "source"))
        end = End(name, device, num_blocks, words)
        end.pool.copy_(content(num_blocks, device))
        queues["invitation"].put(end.plane.invite("other"))
        end.wait_for(LinkUp, 1, LINK_S)
        for turn in range(turns):
            queues["landed"].get(timeout=30)
            for seq, first in enumerate(range(0, num_blocks, FRAME_BLOCKS)):
                blocks = range(first, first + FRAME_BLOCKS)
                end.plane.send("other", Frame(transfer(turn), turn, seq, first, blocks))
            end.wait_for(FrameSent, num_blocks // FRAME_BLOCKS, turn_s)
        while queues["left"].empty():  # words still pass until the target has all
            end.pump()
    except (CheckFailed, NcclError, CudaError, RuntimeError, queue.Empty) as error:
        queues["result"].put({"ok": False, "why": f"source: {error or 'the target does nothing'}"})


def run_target(
    name: str, device: str, num_blocks: int, turns: int, words: Connection, queues: Mapping[str, Queue[Any]]
) -> None:
    """The process that receives, compares and measures."""
    turn_s = _turn_s(name)
    try:
        os.environ.update(_environment(name, "target"))
        end = End(name, device, num_blocks, words)
        end.plane.connect("other", "127.0.0.1", queues["invitation"].get(timeout=30))
        end.wait_for(LinkUp, 1, LINK_S)
        seconds = []
        for turn in range(turns):
            end.plane.land("other", Landing(transfer(turn), turn, 0, range(num_blocks - 1, -1, -1)))
            queues["landed"].put(turn)
            began = time.perf_counter()
            end.wait_for(FrameArrived, num_blocks // FRAME_BLOCKS, turn_s)
            seconds.append(time.perf_counter() - began)
            end.plane.forget(transfer(turn))
        same = torch.equal(end.pool, content(num_blocks, device).flip(0))
        best = num_blocks * BLOCK_BYTES / min(seconds) / 1e9
        queues["result"].put({"ok": same, "gb_per_s": best, "why": "" if same else "the blocks differ"})
    except (CheckFailed, NcclError, CudaError, RuntimeError, queue.Empty) as error:
        queues["result"].put({"ok": False, "why": f"target: {error}"})
    finally:
        queues["left"].put(None)


def _environment(name: str, role: str) -> dict[str, str]:
    if name == "nccl, one device with two ranks":
        return {**ONE_HOST_EACH, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return _seeming_host(role) if name.startswith("nccl") else {}


def _seeming_host(role: str) -> dict[str, str]:
    """Without it NCCL refuses two ranks on one device."""
    return {**ONE_HOST_EACH, "NCCL_HOSTID": role}


def check_pair(name: str, device: str, num_blocks: int, seconds: float, turns: int = 5) -> Outcome:
    """Pass a whole pool from one process to another, some times; return the best rate, or why it did not work."""
    context = multiprocessing.get_context("spawn")
    queues: dict[str, Queue[Any]] = {key: context.Queue() for key in ("invitation", "landed", "result", "left")}
    processes = [
        context.Process(target=run, args=(name, device, num_blocks, turns, words, queues), daemon=True)
        for run, words in zip((run_source, run_target), context.Pipe(), strict=True)
    ]
    for process in processes:
        process.start()
    try:
        return dict(queues["result"].get(timeout=seconds))
    except queue.Empty:
        return {"ok": False, "why": f"not done within {seconds:g} s"}
    finally:
        _end(processes)


def _end(processes: list[SpawnProcess]) -> None:
    for process in processes:
        process.join(2)
        if process.is_alive():
            process.kill()
            process.join()


def send_to_self(seconds: float) -> dict[str, Any]:
    """Whether bytes that one rank sends to itself come back the same: binding, streams and non-blocking calls."""
    context = multiprocessing.get_context("spawn")
    results: Queue[dict[str, Any]] = context.Queue()
    process = context.Process(target=_run_nccl_to_itself, args=(results, seconds), daemon=True)
    process.start()
    try:
        return results.get(timeout=seconds)
    except queue.Empty:
        return {"ok": False, "why": f"not done within {seconds:g} s"}
    finally:
        process.join(2)
        process.kill()


def _run_nccl_to_itself(results: Queue[dict[str, Any]], seconds: float) -> None:
    try:
        results.put(_nccl_to_itself(time.monotonic() + seconds))
    except (NcclError, RuntimeError) as error:
        results.put({"ok": False, "why": str(error)})


def _nccl_to_itself(deadline: float) -> dict[str, Any]:
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


Check = Callable[[float], Outcome]
"""Is given how many seconds it may take."""


def checks(cuda: bool) -> list[dict[str, Check]]:
    """By name. Those of one dictionary run side by side, one dictionary after the other: first what matters most."""
    if not cuda:
        return [
            {"tcp": partial(check_pair, "tcp", "cpu", 64)},
            {"engines: tcp": partial(check_engines, "tcp", "cpu")},
        ]
    seeming_hosts = {role: _seeming_host(role) for role in ("prefill", "decode")}
    return [
        {
            "engines: cuda_ipc": lambda seconds: check_engines("cuda_ipc", "cuda", min(50.0, seconds)),
            "engines: nccl": lambda seconds: check_engines("nccl", "cuda", min(50.0, seconds), seeming_hosts),
        },
        {"cuda_ipc": lambda seconds: check_pair("cuda_ipc", "cuda", 1024, min(25.0, seconds))},
        {"nccl, two seeming hosts": _nccl_pair("nccl, two seeming hosts")},
        {"nccl, to itself": lambda seconds: send_to_self(min(12.0, seconds))},
        {"nccl, one device with two ranks": _two_ranks},
        {"tcp": lambda seconds: check_pair("tcp", "cuda", 1024, min(20.0, seconds))},
        {"engines: tcp": partial(check_engines, "tcp", "cuda")},
    ]


def _nccl_pair(name: str) -> Check:
    return lambda seconds: check_pair(name, "cuda", 32, min(40.0, seconds), turns=2)


def _two_ranks(seconds: float) -> Outcome:
    version = NcclFunctions(find_nccl()).version
    if version < MULTI_RANK:
        return {"ok": False, "why": f"NCCL {version_text(version)} refuses it, from {version_text(MULTI_RANK)} on not"}
    return _nccl_pair("nccl, one device with two ranks")(seconds)


def main() -> int:
    """Print a line for each check; with --json, write the report. Returns 0 whatever the device allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="write the figures with machine, commit and command")
    parser.add_argument("--seconds", type=float, default=300.0, help="for all checks. Default: %(default)s.")
    options = parser.parse_args()
    give_up_at = time.monotonic() + options.seconds
    cuda = torch.cuda.is_available()
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name() if cuda else "none", "nccl": _nccl_version()}
    if not cuda:
        print("no GPU here: planes between devices are skipped")
    if options.json:  # of all processes of the checks
        os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{Path(options.json).with_suffix('')}-nccl-%p.txt"}

    def run(name: str, check: Check) -> None:
        left = give_up_at - time.monotonic()
        outcome = check(left) if left > TOO_LITTLE_S else {"ok": False, "why": "no time left"}
        figures[name] = outcome
        rate = f"  {outcome['gb_per_s']:.1f} GB/s" if "gb_per_s" in outcome else ""
        print(f"{name:<34} {'ok' if outcome['ok'] else 'no'}{rate}  {outcome.get('why', '')}", flush=True)
        if options.json:
            write_report(options.json, "gpu_kv_planes", figures)

    for together in checks(cuda):
        with ThreadPoolExecutor(len(together)) as pool:
            list(pool.map(run, together.keys(), together.values()))
    return 0


def _nccl_version() -> str:
    try:
        return version_text(NcclFunctions(find_nccl()).version)
    except NcclError as error:
        return str(error)


if __name__ == "__main__":
    sys.exit(main())
