"""Which device, and how much of it: names to torch devices, CPU threads, memory."""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import torch
from pagefleet_protocol.freed_memory import keep_freed

from pagefleet_engine.config import Device, cpu_threads
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.loader.memory import free_bytes
from pagefleet_engine.ranks.group import RankGroup

MAX_KERNELS = 256
"""Of one shape each, in all some 200 MB. With 1,024 it was a gigabyte, and 5 % more tokens of short requests."""

_KEPT_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the device; on a CPU `total` is what this process may still take, as others share the machine."""

    total: int
    free: int

    def shared_by(self, count: int) -> DeviceMemory:
        """What each of so many has when they share it evenly."""
        return DeviceMemory(self.total // count, self.free // count)

    def without(self, num_bytes: int) -> DeviceMemory:
        """What is left when so much is somebody else's; all of it where there is not as much, for them to tell."""
        kept = num_bytes if num_bytes < self.free else 0
        return DeviceMemory(self.total - kept, self.free - kept)


def resolve_device(requested: Device) -> torch.device:
    """The device of a name; `auto` takes CUDA where there is a GPU.

    Raises:
        ConfigError: CUDA is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise ConfigError(
            "device is cuda, and torch finds no CUDA GPU: give --device cpu, or check driver and torch build"
        )
    return torch.device("cuda" if has_cuda and requested != "cpu" else "cpu")


def set_num_threads(requested: int | None) -> int:
    """Let torch compute with `requested` threads, or with OMP_NUM_THREADS, or one per core that this process may use.

    Returns the number.

    Raises:
        ConfigError: the number is under 1.
    """
    num_threads = cpu_threads(requested)
    torch.set_num_threads(num_threads)
    return num_threads


def limit_kernel_caches() -> None:
    """Have torch keep fewer compiled kernels of the CPU, unless the environment says how many; before it makes any.

    There are two caches of 1,024, least recently used first: oneDNN's of kernels, and torch's of their descriptions. A
    kernel takes up to a megabyte of the two, so an engine's memory would grow by a gigabyte over its first hours.
    """
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(MAX_KERNELS))


def keep_kernels(folder: Path) -> None:
    """Have Triton keep compiled kernels in `folder`, where the next start finds them, unless the environment says
    where; before the first is compiled. They run in this process: a folder that others made or may write is not used.
    Without a folder the next start takes its time.
    """
    if "TRITON_CACHE_DIR" in os.environ:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        is_ours = found.st_uid == os.geteuid() and not found.st_mode & stat.S_IWOTH
        if is_ours and os.access(folder, os.W_OK):
            os.environ["TRITON_CACHE_DIR"] = str(folder)


def keep_step_memory() -> None:
    """Use a step's memory again for the next one. For a CPU, once all that stays is built.

    Each step of a long prompt would touch some hundred megabytes of new pages, which takes up to a third of its time;
    whether it does hangs on what lies behind them in the heap.
    """
    keep_freed(_KEPT_BYTES, _KEPT_BYTES)


def probe_memory(device: torch.device, ranks: RankGroup | None = None) -> DeviceMemory:
    """What the device has and what is left of it, now; of a machine's memory, the part of one of its `ranks`, which
    must all ask at once."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free)
    free = free_bytes(device, ranks)
    return DeviceMemory(free, free)
