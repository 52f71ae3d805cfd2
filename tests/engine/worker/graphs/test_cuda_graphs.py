"""The same proof on a GPU: real graphs, the Triton kernels, and no wait for the device between capture and result."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.attention.triton_backend import TritonBackend
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.models.model import Model
from pagefleet_engine.worker.forward import EagerForward
from pagefleet_engine.worker.graphs.capture import CudaGraphs
from pagefleet_engine.worker.graphs.dispatcher import GraphDispatcher
from pagefleet_engine.worker.graphs.graph_forward import GraphForward
from pagefleet_engine.worker.graphs.modes import GraphMode
from pagefleet_engine.worker.profile import estimate_graph_bytes
from pagefleet_kernels.layout import KVLayout
from torch import Tensor

from tests.fakes.graph_steps import (
    BLOCK_SIZE,
    SIZES,
    Steps,
    kv_groups,
    make_graph_forward,
    make_rows,
    random_rows,
    small_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),  # torch calls it a prototype
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GRAPH_MODES = [mode for mode in GraphMode if mode is not GraphMode.NONE]
DEVICE = "cuda"


@contextmanager
def no_waits() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def pool_and_backend(model: Model, steps: Steps) -> tuple[Tensor, TritonBackend]:
    groups, arch = kv_groups(model), model.arch
    layout = KVLayout(steps.num_blocks, groups.layers_per_block, arch.num_kv_heads, BLOCK_SIZE, arch.head_dim)
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(layout.shape, generator=generator).to(DEVICE)
    return pool, TritonBackend(pool, layout, groups)


class CudaTwins:
    """A model by graphs and the same without, each with pages of its own."""

    def __init__(self, family: str, mode: GraphMode) -> None:
        model = small_model(family, device=DEVICE, use_kernels=True, hidden_size=256)
        self.steps = Steps(kv_groups(model), DEVICE)
        self.pool, backend = pool_and_backend(model, self.steps)
        self.plain_pool, plain_backend = pool_and_backend(model, self.steps)
        self.graphs = CudaGraphs(torch.device(DEVICE))
        self.by_graph: GraphForward = make_graph_forward(model, backend, mode, self.graphs)
        self.plain = EagerForward(model, plain_backend)
        self.report = self.by_graph.capture(self.steps.inputs)


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_every_step_is_as_without_graphs(family: str, mode: GraphMode) -> None:
    twins = CudaTwins(family, mode)
    rng = random.Random(5)
    steps = [random_rows(rng, decode=number % 3 == 0) for number in range(24)]
    expected = []
    for rows in steps:  # first all without graphs: this also loads what a kernel needs for a new shape
        twins.steps.prepare(rows, len(rows.slots_S), rows.num_tokens)
        expected.append(twins.plain.run(rows, 0, twins.steps.inputs).clone())
    for rows, hidden in zip(steps, expected, strict=True):
        shape = twins.by_graph.shape(rows, 0)
        twins.steps.prepare(rows, shape.num_rows, shape.num_tokens)
        with no_waits():
            found = twins.by_graph.run(rows, 0, twins.steps.inputs)
        torch.testing.assert_close(found, hidden, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(twins.pool, twins.plain_pool, atol=2e-2, rtol=2e-2)


@torch.inference_mode()
def test_a_replay_gives_the_same_bits_whatever_ran_between() -> None:
    twins = CudaTwins("llama", GraphMode.FULL_AND_PIECEWISE)
    rows = make_rows([(1, 9, 1), (3, 20, 1)])
    found = []
    for between in ([(0, 7, 5)], [(slot, 12, 1) for slot in range(8)]):
        for step in (rows, make_rows(between)):
            shape = twins.by_graph.shape(step, 0)
            twins.steps.prepare(step, shape.num_rows, shape.num_tokens)
            hidden = twins.by_graph.run(step, 0, twins.steps.inputs)
            if step is rows:
                found.append(hidden.clone())
    assert torch.equal(found[0], found[1])


@torch.inference_mode()
def test_capture_reports_what_it_took_and_the_estimate_is_near() -> None:
    twins = CudaTwins("llama", GraphMode.FULL_AND_PIECEWISE)
    assert twins.report.count == len(SIZES) + len([size for size in SIZES if size <= 8])
    assert twins.report.memory >= 0
    model = small_model(device=DEVICE, use_kernels=True, hidden_size=256)
    steps = Steps(kv_groups(model), DEVICE)
    _, backend = pool_and_backend(model, steps)
    forward = make_graph_forward(model, backend, GraphMode.FULL_AND_PIECEWISE, CudaGraphs(torch.device(DEVICE)))
    estimate = estimate_graph_bytes(forward, steps.inputs)
    taken = forward.capture(steps.inputs).memory
    assert abs(estimate - taken) <= 64 * 2**20


@torch.inference_mode()
def test_a_capture_that_waits_fails_with_advice_and_leaves_the_device_usable() -> None:
    model = small_model(device=DEVICE, use_kernels=True, hidden_size=256)
    steps = Steps(kv_groups(model), DEVICE)
    _, backend = pool_and_backend(model, steps)
    dispatcher = GraphDispatcher(GraphMode.FULL, (2,), 2)
    forward = GraphForward(Waiting(model), backend, dispatcher, CudaGraphs(torch.device(DEVICE)))
    with pytest.raises(ConfigError, match="start with --cuda-graphs none"):
        forward.capture(steps.inputs)
    assert torch.ones(3, device=DEVICE).sum().item() == 3.0


class Waiting:
    """Asks the device for a number in the middle of a pass."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        hidden: Tensor = self.model.forward(entering, positions_T, step)
        return hidden * hidden.max().item()

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return self.model.logits(hidden_SD)
