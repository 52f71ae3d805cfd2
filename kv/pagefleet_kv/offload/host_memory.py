"""Host memory for blocks: pinned where a GPU copies to and from it, so that copies run beside the steps."""

from __future__ import annotations

import mmap

import torch

from pagefleet_kv.errors import KVConfigError

_GIB = 1024**3


class HostMemory:
    """Writable bytes. The system gives plain memory page by page, as it is first used, and pinned memory at once.

    Memory is pinned where it lies: torch's own pinned memory comes in powers of two, up to twice what is asked for.
    """

    def __init__(self, num_bytes: int, free: int, *, pinned: bool) -> None:
        """Take the memory.

        Raises:
            KVConfigError: it is more than `free` bytes, or cannot be pinned.
        """
        if num_bytes > free:  # the system would give it, and end a process when it is used
            raise KVConfigError(
                f"kv_offload_memory takes {num_bytes / _GIB:.2f} GiB of memory and {free / _GIB:.2f} GiB are free: "
                "lower it, or give the engine more"
            )
        self._address: int | None = None
        try:
            self.view = memoryview(mmap.mmap(-1, num_bytes))
            if pinned:
                address = torch.frombuffer(self.view, dtype=torch.uint8).data_ptr()
                torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))  # type: ignore[no-untyped-call]
                self._address = address
        except (OSError, RuntimeError):
            raise KVConfigError(
                f"kv_offload_memory takes {num_bytes} bytes and the system does not give as much: lower it"
            ) from None

    def release(self) -> None:
        """Pin it no more; no copy may be under way. May be called twice."""
        if self._address is not None:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]
            self._address = None
