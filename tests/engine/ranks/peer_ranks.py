"""One of several ranks that add up through each other's memory: peer_ranks.py FOLDER INDEX SIZE DEVICE.

Run by test_gpu_peers.py, a process for each; several may have the same device. Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from pagefleet_engine.ranks.peers import open_peers
from pagefleet_kernels.rank_sum import MAX_BYTES, PeerMemory, sum_ranks_

# torch.distributed has it too, but its types do not say so.
from torch._C._distributed_c10d import FileStore

ROUNDS = [
    (1, torch.bfloat16),
    (4096, torch.bfloat16),
    (4097, torch.float16),
    (5000, torch.bfloat16),
    (MAX_BYTES // 4, torch.float32),
]


def expected(parts: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks, added up in their order and rounded once."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


def parts_of(seed: int, size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Every rank's part, which each makes alike."""
    return torch.randn(size, count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def add_up_at_once(memory: PeerMemory, size: int) -> None:
    for seed, (count, dtype) in enumerate(ROUNDS * 4):
        parts = parts_of(seed, size, count, dtype)
        found = sum_ranks_(parts[memory.index].cuda(), memory)
        assert torch.equal(found.cpu(), expected(parts)), f"round {seed}: {count} of {dtype}"


def add_up_in_a_graph(memory: PeerMemory, size: int) -> None:
    """Three sums in one graph, each of what the one before gave; replayed with other inputs."""
    x, out = torch.zeros(5000, dtype=torch.bfloat16, device="cuda"), []
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x.clone()
        for _ in range(3):
            y = sum_ranks_(y / 2, memory)
            out.append(y.clone())
    for seed in range(6):
        parts = parts_of(100 + seed, size, 5000, torch.bfloat16)
        x.copy_(parts[memory.index])
        graph.replay()
        told = expected(parts / 2)
        assert torch.equal(out[0].cpu(), told), f"replay {seed}"
        for after in out[1:]:
            told = expected((told / 2).expand(size, -1))
            assert torch.equal(after.cpu(), told), f"replay {seed}"


def wait_in_vain(memory: PeerMemory) -> float:
    """A round to which rank 1 does not come; returns the seconds that it took."""
    memory.wait_at_most(1.0)
    torch.cuda.synchronize()
    began = time.monotonic()
    assert bool(sum_ranks_(torch.ones(8, device="cuda"), memory).isnan().all())
    assert int(memory.late) == 2
    return time.monotonic() - began


def main(folder: str, index: int, size: int, device: int) -> None:
    torch.cuda.set_device(device)
    store = FileStore(f"{folder}/store", size)
    memory = open_peers(store, index, size)
    if memory is None:
        print(json.dumps({"reached": False}))
        return
    add_up_at_once(memory, size)
    add_up_in_a_graph(memory, size)
    waited = wait_in_vain(memory) if index == 0 else 0.0
    store.set(f"done {index}", "yes")
    if index:
        store.get("done 0")  # what it gives to be read stays until then
    print(json.dumps({"reached": True, "waited_s": waited}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
