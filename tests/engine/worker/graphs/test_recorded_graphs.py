"""The recorded graphs themselves: they must notice what a device would not forgive."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.fakes.recorded_graphs import HostWait, RecordedGraph, RecordedGraphs


@pytest.fixture(autouse=True)
def _inference() -> object:
    with torch.inference_mode():
        yield


def capture(graphs: RecordedGraphs, run: Callable[[], object]) -> RecordedGraph:
    with graphs.session():
        graphs.begin()
        try:
            run()
            return graphs.end()
        finally:
            graphs.abandon()


def test_a_replay_reads_what_its_inputs_hold_now() -> None:
    x, y, out = torch.ones(3), torch.ones(3), torch.zeros(3)
    graph = capture(RecordedGraphs(), lambda: out.copy_((x * 2 + y).relu_().sub_(1)))
    x.fill_(5.0)
    y.fill_(-3.0)
    graph.replay()
    assert out.tolist() == [6.0, 6.0, 6.0]


def test_views_and_parts_of_tensors_are_followed() -> None:
    x, out = torch.arange(6.0).view(2, 3), torch.zeros(3, 2)

    def run() -> None:
        left, right = x.split_with_sizes((1, 2), 1)
        right.mul_(2)  # a write through a view
        out.copy_(torch.cat((right, left), dim=1).t())

    graph = capture(RecordedGraphs(), run)
    x.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    graph.replay()
    assert out.tolist() == [[4.0, 10.0], [6.0, 12.0], [1.0, 4.0]]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool(x[0] > 0),
        lambda x: int(x[0]),
        lambda x: [0, 1][x[0].long()],
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.equal(x, x),
        lambda x: x.numpy(),
        lambda x: x.cpu(),
        lambda x: torch.tensor([1.0, 2.0]),
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: x.index_put_((x > 0,), x[:1]),
    ],
)
def test_what_makes_the_host_wait_is_refused(wait: Callable[[Tensor], object]) -> None:
    with pytest.raises(HostWait):
        capture(RecordedGraphs(), lambda: wait(torch.ones(4)))


@pytest.mark.parametrize(
    "allowed",
    [
        lambda x: x.masked_fill_(x > 0, 1.0),
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: torch.arange(4) + torch.zeros(4) + x.new_full((4,), 2.0),
        lambda x: x[torch.arange(2)],
        lambda x: torch.repeat_interleave(x, 2),
    ],
)
def test_what_a_device_can_do_alone_is_not(allowed: Callable[[Tensor], object]) -> None:
    assert capture(RecordedGraphs(), lambda: allowed(torch.ones(4))).operations


def test_a_tensor_that_crosses_a_break_keeps_its_memory() -> None:
    graphs, x, out = RecordedGraphs(), torch.ones(2), torch.zeros(2)
    crossing: list[Tensor] = []
    first = capture(graphs, lambda: crossing.append(x + 1))
    second = capture(graphs, lambda: out.copy_(crossing.pop() * 2))
    x.fill_(4.0)
    first.replay()
    second.replay()
    assert out.tolist() == [10.0, 10.0]


def test_what_had_ended_is_spoiled_by_its_own_graph_and_later_ones() -> None:
    graphs, x = RecordedGraphs(), torch.ones(2)
    address: list[Tensor] = []
    graph = capture(graphs, lambda: address.append((x + 1).detach()))
    graph.replay()
    assert address[0].tolist() == [2.0, 2.0]
    address.clear()
    later = capture(graphs, lambda: x + 2)
    later.replay()
    assert all(block.ended_by is not None for block in graphs.blocks.values())
    for block in graphs.blocks.values():
        spoiled = torch.tensor([], dtype=torch.float32).set_(block.storage)
        assert spoiled.isnan().all()


def test_a_result_left_in_the_pool_does_not_outlive_an_earlier_graph() -> None:
    """Its memory may be what the earlier graph works in."""
    graphs, x = RecordedGraphs(), torch.ones(2)
    results: list[Tensor] = []
    first = capture(graphs, lambda: results.append(x + 1))
    second = capture(graphs, lambda: results.append(x + 2))
    second.replay()
    assert results[1].tolist() == [3.0, 3.0]
    first.replay()
    assert results[0].tolist() == [2.0, 2.0]
    assert results[1].isnan().all()


def test_memory_that_is_never_written_holds_no_numbers() -> None:
    graphs, x, out = RecordedGraphs(), torch.ones(2), torch.zeros(2)
    graph = capture(graphs, lambda: out.copy_(torch.empty(2).mul_(0.0) + x))
    graph.replay()
    graph.replay()
    assert out.isnan().all()


def test_captures_are_made_one_at_a_time_and_in_a_session() -> None:
    graphs = RecordedGraphs()
    with pytest.raises(AssertionError, match="session"):
        graphs.begin()
    with graphs.session():
        graphs.begin()
        with pytest.raises(AssertionError, match="nest"):
            graphs.begin()
        graphs.abandon()
        with pytest.raises(AssertionError, match="no capture"):
            graphs.end()
