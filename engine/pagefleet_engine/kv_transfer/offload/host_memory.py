"""Host memory for blocks: pinned where a GPU copies to and from it, so that copies run beside the steps."""

from __future__ import annotations

import mmap

import torch

from pagefleet_engine.errors import ConfigError


def allocate_slots(num_bytes: int, *, pinned: bool) -> memoryview:
    """Return writable bytes. Plain memory is taken from the system page by page, as it is first used.

    Raises:
        ConfigError: the system does not give as much.
    """
    try:
        if not pinned:
            return memoryview(mmap.mmap(-1, num_bytes))
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy().data
    except (OSError, RuntimeError):
        raise ConfigError(
            f"kv_offload_memory takes {num_bytes} bytes and the system does not give as much: lower it"
        ) from None
