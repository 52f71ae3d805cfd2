"""Which rank is which, and which layers each stage of a pipeline has."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pagefleet_engine.errors import ConfigError
from pagefleet_engine.ranks.parallelism import Parallelism, RankPart


def test_numbers_run_over_the_tensor_ranks_of_the_first_stage_then_of_the_next() -> None:
    parallel = Parallelism(tensor_parallel_size=2, pipeline_parallel_size=3)
    parts = [parallel.part(rank) for rank in range(parallel.world_size)]
    assert [(part.stage, part.tensor) for part in parts] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [part.is_first for part in parts] == [True, True, False, False, False, False]
    assert [part.is_last for part in parts] == [False, False, False, False, True, True]
    assert [part.tells for part in parts].index(True) == 4
    assert sum(part.tells for part in parts) == 1
    assert Parallelism().part(0) == RankPart()
    assert RankPart().tells


def test_a_rank_s_name_says_what_its_number_does_not() -> None:
    assert Parallelism(tensor_parallel_size=2).name(1) == "rank 1"
    assert Parallelism(pipeline_parallel_size=3).name(2) == "rank 2 (stage 2)"
    copies = Parallelism(tensor_parallel_size=2, data_parallel_size=4, data_parallel_rank=3)
    assert copies.name(0) == "rank 0 (copy 3)"
    nodes = Parallelism(tensor_parallel_size=2, pipeline_parallel_size=2, nnodes=2, master_addr="node-0")
    assert [nodes.name(rank) for rank in (1, 2)] == [
        "rank 1 (stage 0, tensor rank 1, node 0)",
        "rank 2 (stage 1, tensor rank 0, node 1)",
    ]


def over(nodes: int, copies: int, **sizes: Any) -> Parallelism:
    return Parallelism(nnodes=nodes, data_parallel_size=copies, master_addr="node-0", **sizes)


def test_some_copies_on_each_machine() -> None:
    parallel = over(2, 4, tensor_parallel_size=2)
    assert [parallel.copies_on(node) for node in range(2)] == [range(2), range(2, 4)]
    assert [[parallel.ranks_of(node, copy) for copy in range(4)] for node in range(2)] == [
        [range(2), range(2), range(0), range(0)],
        [range(0), range(0), range(2), range(2)],
    ]
    assert [parallel.index_on_node(copy) for copy in range(4)] == [0, 1, 0, 1]
    assert [parallel.port_of(copy) for copy in range(4)] == [29500, 29501, 29502, 29503]
    assert parallel.name(1, 3) == "rank 1 (copy 3, node 1)"


def test_some_machines_for_each_copy() -> None:
    parallel = over(4, 2, pipeline_parallel_size=2)
    assert [parallel.nodes_of(copy) for copy in range(2)] == [range(2), range(2, 4)]
    assert [parallel.copies_on(node) for node in range(4)] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [parallel.ranks_of(node, 1) for node in range(4)] == [range(0), range(0), range(1), range(1, 2)]
    assert [parallel.index_on_node(copy) for copy in range(2)] == [0, 0]
    assert parallel.name(1, 1) == "rank 1 (copy 1, stage 1, node 3)"


def test_copies_of_one_machine_see_their_own_devices_first() -> None:
    parallel = Parallelism(data_parallel_size=3, tensor_parallel_size=2)
    assert (parallel.copies_a_node, parallel.copies_on(0), parallel.ranks_of(0, 2)) == (3, range(3), range(2))
    assert parallel.index_on_node(2) == 0


@pytest.mark.parametrize(
    ("nodes", "copies", "sizes", "says"),
    [
        (2, 3, {}, "3 ranks .* cannot be divided among 2 nodes"),
        (4, 6, {"tensor_parallel_size": 2}, "12 ranks .* cannot be divided among 4 nodes: give a number of nodes"),
        (4, 2, {}, "2 ranks .* cannot be divided among 4 nodes"),
        (2, 4, {"master_port": 65533}, "port 65536 for the last of 4 copies, and ports end at 65535"),
    ],
)
def test_copies_that_machines_cannot_have_evenly(nodes: int, copies: int, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        over(nodes, copies, **sizes)


@pytest.mark.parametrize(
    ("stages", "num_layers", "sizes"),
    [(1, 7, [7]), (2, 12, [6, 6]), (2, 13, [7, 6]), (3, 13, [4, 5, 4]), (3, 14, [5, 5, 4]), (4, 30, [7, 8, 8, 7])],
)
def test_layers_that_are_over_go_where_neither_embedding_nor_head_is(
    stages: int, num_layers: int, sizes: list[int]
) -> None:
    layers = Parallelism(pipeline_parallel_size=stages).stage_layers(num_layers, num_layers - 1)
    assert [len(own) for own in layers] == sizes
    assert [layer for own in layers for layer in own] == list(range(num_layers))


def test_layers_by_name() -> None:
    parallel = Parallelism(pipeline_parallel_size=3, pipeline_layers="10, 12,10")
    assert parallel.stage_layers(32, 31) == [range(10), range(10, 22), range(22, 32)]


@pytest.mark.parametrize("given", ["10,12", "10,12,0", "10,12,x", "10,12,-1", ""])
def test_layers_that_are_no_numbers_for_the_stages(given: str) -> None:
    with pytest.raises(ConfigError, match=f"^pipeline_layers is {re.escape(given)}: give 3 numbers of layers"):
        Parallelism(pipeline_parallel_size=3, pipeline_layers=given)


def test_layers_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError, match=r"^pipeline_layers 2,2 are 4 layers, and the model has 5: give numbers that"):
        Parallelism(pipeline_parallel_size=2, pipeline_layers="2,2").stage_layers(5, 4)
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size is 6, and the model has 5 layers: give 5 at most"):
        Parallelism(pipeline_parallel_size=6).stage_layers(5, 4)


@pytest.mark.parametrize(("stages", "sizes"), [(1, [35]), (2, [18, 17]), (3, [9, 9, 17]), (5, [4, 5, 5, 4, 17])])
def test_layers_that_have_to_be_together_are_the_last_stage(stages: int, sizes: list[int]) -> None:
    """As in Gemma 3n E4B, where the last 17 of 35 layers read what two of them keep."""
    layers = Parallelism(pipeline_parallel_size=stages).stage_layers(35, 18)
    assert [len(own) for own in layers] == sizes


def test_layers_that_have_to_be_together_are_not_parted() -> None:
    with pytest.raises(ConfigError, match=r"35 layers, the last 17 of which have to be together: give 19 at most$"):
        Parallelism(pipeline_parallel_size=20).stage_layers(35, 18)
    with pytest.raises(ConfigError, match=r"^pipeline_layers is 19,16, and the last 17 layers read what some of them"):
        Parallelism(pipeline_parallel_size=2, pipeline_layers="19,16").stage_layers(35, 18)


def test_one_rank_has_no_tokens_to_divide() -> None:
    with pytest.raises(
        ConfigError, match=r"^enable_sequence_parallelism divides tokens among tensor ranks, and tensor_"
    ):
        Parallelism(enable_sequence_parallelism=True)


def test_experts_among_ranks() -> None:
    Parallelism(tensor_parallel_size=4).check_experts(0)
    Parallelism(tensor_parallel_size=4, enable_expert_parallel=True).check_experts(4)
    with pytest.raises(
        ConfigError, match=r"^enable_expert_parallel divides experts among ranks, and there is one: raise"
    ):
        Parallelism(enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"^enable_expert_parallel divides experts, and the model has none: leave"):
        Parallelism(tensor_parallel_size=4, enable_expert_parallel=True).check_experts(0)
    with pytest.raises(ConfigError, match=r"^enable_eplb moves whole experts between ranks: give enable_expert_paral"):
        Parallelism(tensor_parallel_size=2, enable_eplb=True)
    needed = r"^enable_dbo computes while tokens travel .*: give enable_expert_parallel and data_parallel_size"
    with pytest.raises(ConfigError, match=needed):
        Parallelism(tensor_parallel_size=2, enable_expert_parallel=True, enable_dbo=True)
    with pytest.raises(ConfigError, match=needed):
        Parallelism(data_parallel_size=2, enable_dbo=True)
    with pytest.raises(ConfigError, match="dbo_decode_token_threshold"):
        Parallelism(dbo_decode_token_threshold=0)
    with pytest.raises(ConfigError, match=r"^num_redundant_experts is 2, and experts stay where they are: give enable"):
        Parallelism(tensor_parallel_size=2, enable_expert_parallel=True, num_redundant_experts=2)
    moving = Parallelism(tensor_parallel_size=2, enable_expert_parallel=True, enable_eplb=True, num_redundant_experts=5)
    moving.check_experts(5)
    with pytest.raises(ConfigError, match=r"^num_redundant_experts is 5, and 4 experts on each of 2 ranks are 4 more"):
        moving.check_experts(4)
    both = Parallelism(tensor_parallel_size=4, data_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(ConfigError, match=r"^6 experts cannot be divided among 8 ranks .*: give fewer ranks, or leave"):
        both.check_experts(6)
