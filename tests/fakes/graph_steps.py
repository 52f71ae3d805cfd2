"""Models, request tables and random steps for tests of CUDA graphs: small, and ready without a checkpoint.

Shapes: S slots of the request table, B blocks per table.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from pagefleet_engine.attention.backend import AttentionBackend
from pagefleet_engine.core.kv_groups import KVGroups, group_layers
from pagefleet_engine.layers.weight import Placement
from pagefleet_engine.models.model import Model, build_model
from pagefleet_engine.worker.graphs.capture import DeviceGraphs
from pagefleet_engine.worker.graphs.dispatcher import GraphDispatcher
from pagefleet_engine.worker.graphs.graph_forward import GraphForward
from pagefleet_engine.worker.graphs.modes import GraphMode
from pagefleet_engine.worker.request_table import RequestTable
from pagefleet_engine.worker.step_inputs import StepInputBuilder, StepRows

from tests.fakes.architectures import llama_arch

BLOCK_SIZE = 4
MAX_LEN = 64
MAX_ROWS = 8
MAX_TOKENS = 32
SIZES = (1, 2, 4, 8, 16)
"""Largest under MAX_TOKENS, so that some steps find no graph."""


def small_model(
    model_type: str = "llama", device: str = "cpu", use_kernels: bool = False, traceable: bool = False, **changes: Any
) -> Model:
    """Random weights, large enough for tokens to differ clearly; the same for the same arguments."""
    arch = llama_arch(model_type=model_type, vocab_size=64, max_position_embeddings=128, **changes)
    model = build_model(arch, Placement(torch.float32, torch.device(device), use_kernels, traceable=traceable))
    generator = torch.Generator().manual_seed(7)
    for name, weight in model.weights():
        for part, shape in enumerate(weight.part_shapes):
            values = torch.randn(shape, generator=generator)
            weight.fill(part, 1 + values / 8 if "norm" in name else values / 6)
    return model


def kv_groups(model: Model) -> KVGroups:
    """The model's layers, grouped."""
    return group_layers(model.arch.kept_windows)


class Steps:
    """A request table whose slots all hold random text and blocks of their own, and input buffers."""

    def __init__(self, groups: KVGroups, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.table = RequestTable(MAX_ROWS, MAX_LEN, BLOCK_SIZE, len(groups), self.device)
        generator = torch.Generator().manual_seed(3)
        shape = self.table.tokens_SL.shape
        self.table.tokens_SL.copy_(torch.randint(0, 64, shape, generator=generator))
        blocks = torch.randperm(self.num_blocks, generator=generator)
        self.table.block_tables_GSB.copy_(blocks.view(self.table.block_tables_GSB.shape))
        self.inputs = StepInputBuilder(self.table, MAX_ROWS, MAX_TOKENS)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; all are some slot's."""
        return self.table.block_tables_GSB.numel()

    def prepare(self, rows: StepRows, num_rows: int, num_tokens: int) -> None:
        """Fill the buffers, padded to these sizes."""
        rows_R4 = torch.from_numpy(rows.row_table(num_rows, num_tokens)).to(self.device)
        self.inputs.prepare(rows_R4, num_tokens)


def make_rows(lens: list[tuple[int, int, int]]) -> StepRows:
    """Rows of (slot, computed tokens, new tokens); all of them sample."""
    slots, computed, new = (np.array(column, dtype=np.int64) for column in zip(*lens, strict=True))
    first = np.concatenate(([0], new.cumsum()))
    return StepRows(slots, computed, new, first, np.arange(len(lens)))


def random_rows(rng: random.Random, decode: bool) -> StepRows:
    """A step of 1 to MAX_ROWS rows that fits the buffers."""
    slots = rng.sample(range(MAX_ROWS), rng.randint(1, MAX_ROWS))
    room = MAX_TOKENS - len(slots)
    lens = []
    for slot in slots:
        new = 1 if decode else 1 + rng.choice((0, 0, rng.randint(0, min(room, 12))))
        room -= new - 1
        lens.append((slot, rng.randint(0, MAX_LEN - new), new))
    return make_rows(lens)


def make_graph_forward(model: Model, backend: AttentionBackend, mode: GraphMode, graphs: DeviceGraphs) -> GraphForward:
    """Not yet captured."""
    return GraphForward(model, backend, GraphDispatcher(mode, SIZES, MAX_ROWS), graphs)
