"""Steps by graphs against the same steps operation by operation: hidden states and pages must come out the same.

The graphs are recorded ones on the CPU (`tests.fakes.recorded_graphs`), as unforgiving as a device's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pagefleet_engine.attention.backend import AttentionStep
from pagefleet_engine.core.kv_groups import KVGroup, KVGroups
from pagefleet_engine.core.step import CommonStep
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.models.model import Model
from pagefleet_engine.worker.forward import EagerForward, StepShape
from pagefleet_engine.worker.graphs.dispatcher import BatchDescriptor, GraphDispatcher, GraphKey
from pagefleet_engine.worker.graphs.modes import GraphMode
from pagefleet_engine.worker.profile import estimate_graph_bytes
from pagefleet_engine.worker.step_inputs import StepRows
from torch import Tensor

from tests.fakes.graph_steps import (
    BLOCK_SIZE,
    MAX_ROWS,
    SIZES,
    Steps,
    kv_groups,
    make_graph_forward,
    make_rows,
    random_rows,
)
from tests.fakes.graph_steps import small_model as make_model
from tests.fakes.recorded_graphs import HostWait, RecordedGraphs
from tests.fakes.static_attention import StaticAttention

NONE = GraphMode.NONE
GRAPH_MODES = [mode for mode in GraphMode if mode is not NONE]


def attention_for(model: Model, steps: Steps, groups: KVGroups | None = None) -> StaticAttention:
    arch = model.arch
    return StaticAttention(groups or kv_groups(model), steps.num_blocks, BLOCK_SIZE, arch.num_kv_heads, arch.head_dim)


class Twins:
    """A model by graphs and the same without, each with input buffers and pages of its own."""

    def __init__(self, model: Model, mode: GraphMode, groups: KVGroups | None = None) -> None:
        self.graphs = RecordedGraphs()
        self.steps, self.plain_steps = (Steps(groups or kv_groups(model)) for _ in range(2))
        self.attention, self.plain_attention = (attention_for(model, self.steps, groups) for _ in range(2))
        self.by_graph = make_graph_forward(model, self.attention, mode, self.graphs)
        self.plain = EagerForward(model, self.plain_attention)
        self.report = self.by_graph.capture(self.steps.inputs)

    def run(self, rows: StepRows, num_common_blocks: int = 0) -> tuple[Tensor, Tensor]:
        """Hidden states by graph and without."""
        shape = self.by_graph.shape(rows, num_common_blocks)
        self.steps.prepare(rows, shape.num_rows, shape.num_tokens)
        hidden = self.by_graph.run(rows, num_common_blocks, self.steps.inputs)
        self.plain_steps.prepare(rows, len(rows.slots_S), rows.num_tokens)
        return hidden, self.plain.run(rows, 0, self.plain_steps.inputs)

    def check(self, rows: StepRows) -> None:
        found, expected = self.run(rows)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        pages, plain_pages = self.attention.pool[:, :, :-1], self.plain_attention.pool[:, :, :-1]
        torch.testing.assert_close(pages, plain_pages, atol=2e-5, rtol=2e-5)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("family", MODELS)
@torch.inference_mode()
def test_every_step_is_as_without_graphs(family: str, mode: GraphMode) -> None:
    twins = Twins(make_model(family, **MODELS[family]), mode)
    rng = random.Random(5)
    for number in range(8):
        twins.check(random_rows(rng, decode=number % 3 == 0))
    assert twins.graphs.num_replays > 0


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
@torch.inference_mode()
def test_layers_of_several_kv_groups_find_their_own_tables(mode: GraphMode) -> None:
    groups = KVGroups((KVGroup((0, 2), None), KVGroup((1,), None)), layers_per_block=2)
    twins = Twins(make_model(num_hidden_layers=3), mode, groups)
    for decode in (True, False, True, False):
        twins.check(random_rows(random.Random(decode), decode))
    assert twins.graphs.num_replays > 0


@torch.inference_mode()
def test_text_grows_through_graphs_as_without() -> None:
    """A chunked prompt, then token by token, beside a second request that comes and goes."""
    twins = Twins(make_model(), GraphMode.FULL_AND_PIECEWISE)
    for start in (0, 5, 10):
        twins.check(make_rows([(2, start, 5), (6, start, 1)]))
    for position in range(15, 30):
        rows = [(2, position, 1)] + ([(4, position, 1), (0, position - 3, 1)] if position % 3 == 0 else [])
        twins.check(make_rows(rows))


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.PIECEWISE], ids=lambda mode: mode.value)
@torch.inference_mode()
def test_padding_reaches_nobody(mode: GraphMode) -> None:
    """Whatever an earlier, larger step left in the buffers, and although attention gives padding no numbers."""
    twins = Twins(make_model(), mode)
    small = make_rows([(1, 9, 1), (3, 20, 2)])
    alone, _ = twins.run(small)
    alone = alone.clone()
    twins.run(make_rows([(slot, 40 - slot, 2) for slot in range(8)]))
    again, _ = twins.run(small)
    assert torch.equal(again, alone)
    assert alone.isfinite().all()


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
def test_padding_stays_within_the_graphs_sizes(mode: GraphMode) -> None:
    """A kernel is launched for these sizes: a row that pointed past them would be read from and written to there."""
    with torch.inference_mode():
        twins = Twins(make_model(), mode)
        rng = random.Random(9)
        for number in range(20):
            rows = random_rows(rng, decode=number % 2 == 0)
            shape = twins.by_graph.shape(rows, 0)
            twins.steps.prepare(rows, shape.num_rows, shape.num_tokens)
            view = twins.steps.inputs.view(shape.num_rows, shape.num_tokens, rows.max_query_len)
            starts = view.geometry.query_start_loc_S1.tolist()
            held = len(rows.slots_S)
            assert starts[: held + 1] == rows.first_S1.tolist()
            assert starts == sorted(starts)
            assert starts[-1] <= shape.num_tokens
            assert view.geometry.seq_lens_S[held:].tolist() == [0] * (shape.num_rows - held)
            assert view.geometry.slot_mappings[0][rows.num_tokens :].tolist() == [-1] * (
                shape.num_tokens - rows.num_tokens
            )


def joined(*copies: StepRows) -> CommonStep:
    """Of the steps of several copies."""
    return CommonStep(
        num_tokens=max(rows.num_tokens for rows in copies), is_uniform=max(rows.max_query_len for rows in copies) == 1
    )


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
@torch.inference_mode()
def test_copies_run_the_graph_that_has_room_for_each_or_none(mode: GraphMode) -> None:
    """Also beside one that has a prompt, or more tokens than any graph; and compute what they would without."""
    twins, rng, sizes = Twins(make_model(), mode), random.Random(7), set[int]()
    dispatcher = GraphDispatcher(mode, SIZES, MAX_ROWS)
    for number in range(24):
        others = random_rows(rng, decode=number % 4 < 2)
        if number % 8 == 7:
            others = make_rows([(0, 3, max(SIZES) + 1)])
        own = random_rows(rng, decode=number % 3 == 0)
        own = replace(own, common=joined(own, others))
        runs_as, key = dispatcher.dispatch_common(joined(own, others))
        before = twins.graphs.num_replays
        twins.check(own)
        assert (twins.graphs.num_replays > before) == (runs_as is not NONE)
        shape = twins.by_graph.shape(own, 0)
        assert shape.num_tokens == (own.num_tokens if runs_as is NONE else key.num_tokens)
        sizes.add(0 if runs_as is NONE else key.num_tokens)
    assert {0, 8} < sizes


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
@torch.inference_mode()
def test_a_copy_without_tokens_replays_what_the_others_do(mode: GraphMode) -> None:
    twins = Twins(make_model(), mode)
    pages = twins.attention.pool[:, :, :-1].clone()
    for others in (make_rows([(0, 9, 1), (1, 3, 1)]), make_rows([(0, 3, 5)]), make_rows([(0, 3, max(SIZES) + 1)])):
        common = joined(others)
        before = twins.graphs.num_replays
        twins.by_graph.run_empty(twins.steps.inputs, common)
        replayed = twins.graphs.num_replays - before
        twins.run(replace(others, common=common))
        assert twins.graphs.num_replays - before == 2 * replayed
        assert bool(replayed) == (common.num_tokens <= max(SIZES) and (mode.for_mixed is not NONE or common.is_uniform))
        pages_now = twins.attention.pool[:, :, :-1]
        assert (pages_now != pages).any()
        pages = pages_now.clone()
        twins.by_graph.run_empty(twins.steps.inputs, common)
        assert torch.equal(twins.attention.pool[:, :, :-1], pages), "nobody's pages are written to"


@torch.inference_mode()
def test_a_step_too_large_for_any_graph_is_run_without() -> None:
    twins = Twins(make_model(), GraphMode.FULL)
    twins.check(make_rows([(0, 3, max(SIZES) + 1)]))
    assert twins.graphs.num_replays == 0


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
@torch.inference_mode()
def test_a_shared_prefix_is_attended_to_outside_of_graphs(mode: GraphMode) -> None:
    twins = Twins(make_model(), mode)
    seen: list[int] = []
    begin = twins.attention.begin
    twins.attention.begin = lambda batch: seen.append(batch.num_common_blocks) or begin(batch)  # type: ignore[method-assign, func-returns-value]
    found, expected = twins.run(make_rows([(0, 9, 1), (1, 9, 1)]), num_common_blocks=2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert seen == [2]


@torch.inference_mode()
def test_capture_reports_what_it_made() -> None:
    twins = Twins(make_model(), GraphMode.FULL_AND_PIECEWISE)
    decode = [size for size in SIZES if size <= 8]
    assert twins.report.count == len(SIZES) + len(decode)
    assert twins.report.memory == twins.graphs.memory_used() > 0
    assert twins.report.seconds > 0
    assert twins.report.describe().startswith(f"captured {twins.report.count} CUDA graphs in ")


@torch.inference_mode()
def test_the_estimate_needs_four_captures_and_keeps_none() -> None:
    model = make_model()
    steps, graphs = Steps(kv_groups(model)), CountingGraphs([5000, 100, 7000, 10])
    forward = make_graph_forward(model, attention_for(model, steps), GraphMode.FULL_AND_PIECEWISE, graphs)
    estimate = estimate_graph_bytes(forward, steps.inputs)
    # 5 piecewise sizes and 4 of decoding; an estimate may not be an accident of one mode.
    assert estimate == 5000 + 4 * 100 + 7000 + 3 * 10
    rows = make_rows([(0, 5, 1), (1, 5, 1), (2, 5, 1)])
    assert forward.shape(rows, 0) == StepShape(3, 3)  # without a graph there is nothing to pad for
    steps.prepare(rows, 3, 3)
    assert forward.run(rows, 0, steps.inputs).isfinite().all()
    assert graphs.num_replays == 0


@torch.inference_mode()
def test_capturing_writes_to_nobodys_pages() -> None:
    model = make_model()
    steps = Steps(kv_groups(model))
    attention = attention_for(model, steps)
    forward = make_graph_forward(model, attention, GraphMode.FULL_AND_PIECEWISE, RecordedGraphs())
    steps.prepare(make_rows([(slot, 8, 3) for slot in range(8)]), 8, 24)  # such as rehearsing leaves behind
    before = attention.pool[:, :, :-1].clone()
    forward.capture(steps.inputs)
    assert torch.equal(attention.pool[:, :, :-1], before)


class CountingGraphs(RecordedGraphs):
    """Each capture takes a given number of bytes."""

    def __init__(self, taken: list[int]) -> None:
        super().__init__()
        self._taken = taken
        self._used = 0
        self._calls = 0

    def memory_used(self) -> int:
        self._calls += 1
        if self._calls % 2 == 0:
            self._used += self._taken.pop(0)
        return self._used


class Spoiled:
    """A model whose forward pass does one thing more."""

    divided_head = None

    def __init__(self, model: Model, spoil: Callable[[Tensor], Tensor]) -> None:
        self.model, self.spoil, self.arch = model, spoil, model.arch

    def forward(self, entering: Tensor, positions_T: Tensor, step: AttentionStep) -> Tensor:
        return self.spoil(self.model.forward(entering, positions_T, step))

    def logits(self, hidden_SD: Tensor) -> Tensor:
        return self.model.logits(hidden_SD)

    def excerpt(self) -> Spoiled:
        return Spoiled(self.model.excerpt(), self.spoil)

    def weights(self) -> Any:
        return self.model.weights()


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda hidden: hidden * hidden.max().item(),
        lambda hidden: hidden if bool(hidden[0, 0] > 2) else hidden + 1,
        lambda hidden: hidden + torch.tensor([1.0]),
        lambda hidden: hidden.masked_fill(hidden > 0, 1.0)[hidden[:, 0] > 0],
    ],
    ids=["item", "branch", "constant from the host", "mask"],
)
@torch.inference_mode()
def test_a_model_that_waits_for_the_device_is_caught(spoil: Callable[[Tensor], Tensor], mode: GraphMode) -> None:
    with pytest.raises(HostWait):
        Twins(Spoiled(make_model(), spoil), mode)


@torch.inference_mode()
def test_a_number_of_the_host_that_changes_is_caught() -> None:
    """A graph keeps the number that it was captured with: the comparison must see that."""
    scale = [1.0]
    twins = Twins(Spoiled(make_model(), lambda hidden: hidden * scale[0]), GraphMode.FULL)
    rows = make_rows([(0, 5, 1)])
    twins.check(rows)
    scale[0] = 2.0
    found, expected = twins.run(rows)
    torch.testing.assert_close(found * 2, expected, atol=4e-5, rtol=2e-5)


class FailingGraphs(RecordedGraphs):
    """Fails at the end of the first capture."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def end(self) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate"), "--cuda-graph-sizes"),
        (RuntimeError("operation not permitted when stream is capturing\nmore"), r"\(operation .* capturing\)"),
    ],
)
@pytest.mark.parametrize("mode", GRAPH_MODES, ids=lambda mode: mode.value)
@torch.inference_mode()
def test_a_failed_capture_names_the_flag_and_ends(error: Exception, advice: str, mode: GraphMode) -> None:
    model = make_model()
    steps, graphs = Steps(kv_groups(model)), FailingGraphs(error)
    forward = make_graph_forward(model, attention_for(model, steps), mode, graphs)
    with pytest.raises(ConfigError, match=rf"{advice}.*--cuda-graphs none"):
        forward.capture(steps.inputs)
    torch.zeros(1).item()  # nothing is being recorded any more


def test_every_graph_of_a_mode_is_captured_once() -> None:
    with torch.inference_mode():
        twins = Twins(make_model(), GraphMode.FULL)
    keys: list[GraphKey] = list(twins.by_graph.keys)
    assert len(keys) == len(set(keys)) == twins.report.count
    assert (GraphMode.FULL, BatchDescriptor(4, 4, uniform=True)) in keys
