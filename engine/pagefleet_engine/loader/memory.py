"""Does a model fit? Asked before its weights are loaded, and answered with the arithmetic."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from pagefleet_engine.errors import ModelLoadError
from pagefleet_engine.layers.linear_kernel import is_laid_out
from pagefleet_engine.layers.shard import own_share
from pagefleet_engine.layers.weight import Placement, Weight
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.ranks.group import RankGroup

_GIB = 1024**3


def weight_bytes(arch: ModelArch, weights: Iterable[tuple[str, Weight]], placement: Placement) -> int:
    """What the weights will take: every slot, and the packed copy that a tied head makes of the embedding."""
    total = sum(weight.nbytes for _, weight in weights)
    has_head = placement.own_layers(arch.num_layers).stop == arch.num_layers
    if has_head and arch.tie_word_embeddings and is_laid_out(placement.dtype, placement.device, placement.native):
        rows = own_share(arch.vocab_size, placement.tensor, "a vocabulary").size
        total += rows * arch.hidden_size * placement.dtype.itemsize
    return total


def check_memory(needed: int, free: int, placement: Placement) -> None:
    """Raises ModelLoadError when `needed` bytes of weights are more than `free` bytes."""
    if needed > free:
        name = str(placement.dtype).removeprefix("torch.")
        remedies = ["--dtype bfloat16"] if placement.dtype.itemsize > 2 else []
        if placement.quantization is None:
            if placement.use_kernels:
                remedies.append("--quantization fp8")
            elif placement.native is not None:
                remedies.append("--quantization int8")
        remedy = ", ".join((*remedies, "a smaller model"))
        raise ModelLoadError(
            f"the weights take {needed / _GIB:.2f} GiB in {name}, {free / _GIB:.2f} GiB are free on "
            f"{placement.device}: choose {remedy}, or a machine with more memory"
        )


def free_bytes(device: torch.device, ranks: RankGroup | None = None) -> int:
    """Memory that can still be taken: of the GPU, or of this machine within the limit of this process's container.

    Of a machine's memory each of the `ranks` on it gets an equal part; all of them must ask at once.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if ranks is None or ranks.size == 1:
        return _machine_free_bytes()
    sharing = ranks_on(socket.gethostname(), ranks)
    free = _machine_free_bytes()
    ranks.barrier()
    return free // sharing


def ranks_on(machine: str, ranks: RankGroup) -> int:
    """How many of the ranks are on a machine, of which each names its own; waits for all of them."""
    own = torch.tensor([zlib.crc32(machine.encode())])
    return int((ranks.all_gather(own, [1] * ranks.size) == own).sum())


def _machine_free_bytes() -> int:
    available = int(psutil.virtual_memory().available)
    limited = container_free_bytes(Path("/sys/fs/cgroup"))
    return available if limited is None else min(available, limited)


def container_free_bytes(cgroup: Path) -> int | None:
    """What a container's memory limit leaves, from its control group (version 2 or 1); None: no limit.

    Cached file pages that are not in use count as free: the kernel drops them first.
    """
    for directory, limit_name, used_name, cached_name in (
        (cgroup, "memory.max", "memory.current", "inactive_file"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (directory / limit_name).read_text().strip()
            used = int((directory / used_name).read_text())
            stat = (directory / "memory.stat").read_text()
        except OSError:
            continue
        if limit == "max":
            return None
        cached = next((int(line.split()[1]) for line in stat.splitlines() if line.startswith(cached_name + " ")), 0)
        return max(0, int(limit) - used + cached)
    return None
