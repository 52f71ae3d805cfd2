"""One sequence in pages, as a GPU's attention reads them, on the kernels' torch twins."""

from __future__ import annotations

import torch
from pagefleet_engine.attention.backend import AttentionStep, BatchGeometry
from pagefleet_engine.attention.triton_backend import TritonBackend
from pagefleet_engine.core.kv_groups import group_layers
from pagefleet_engine.models.arch import ModelArch
from pagefleet_engine.worker.runner_factory import kv_layout

BLOCK_SIZE = 8


def paged_step(arch: ModelArch, num_tokens: int) -> AttentionStep:
    """A step of that many tokens: a new sequence, in pages that lie in reverse order."""
    groups = group_layers(arch.kept_windows)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    layout = kv_layout(arch.kv, num_blocks * len(groups), groups, BLOCK_SIZE)
    tables = torch.arange(layout.num_blocks, dtype=torch.int32).flip(0).view(len(groups), 1, num_blocks)
    position = torch.arange(num_tokens)
    slots = [table[0, position // BLOCK_SIZE].long() * BLOCK_SIZE + position % BLOCK_SIZE for table in tables]
    return TritonBackend(torch.zeros(layout.shape), layout, groups).begin(
        BatchGeometry(
            query_start_loc_S1=torch.tensor([0, num_tokens], dtype=torch.int32),
            seq_lens_S=torch.tensor([num_tokens], dtype=torch.int32),
            block_tables=tuple(tables),
            slot_mappings=tuple(slots),
            max_query_len=num_tokens,
        )
    )
