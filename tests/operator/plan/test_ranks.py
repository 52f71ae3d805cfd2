"""Over how many ranks, GPUs and nodes an engine is spread, by what of it is written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pagefleet_operator.plan.ranks import Ranks, find_ranks
from pagefleet_protocol.inference_service import InferenceService

from tests.operator.plan.kube_world import profile

_DOCUMENT: dict[str, Any] = {
    "apiVersion": "pagefleet.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "qwen"},
    "spec": {"model": {"uri": "builtin://tiny"}},
}


def find(profiled: Any = None, **spec: Any) -> tuple[Ranks | str, dict[str, str]]:
    notes: dict[str, str] = {}
    given = profile(**profiled) if profiled is not None else None
    # Without the rules of resources: a profile can lead to what they refuse.
    written = InferenceService.model_validate_json(json.dumps({**_DOCUMENT, "spec": {**_DOCUMENT["spec"], **spec}}))
    found = find_ranks(written, given, lambda path, value, why: notes.update({path: f"{value}, {why}"}))
    return found, notes


@pytest.mark.parametrize(
    ("profiled", "spec", "expected"),
    [
        # One node.
        (None, {}, Ranks()),
        (None, {"parallelism": {"tensor": 2}}, Ranks(2)),
        (None, {"resources": {"gpus": 0}, "parallelism": {"tensor": 2, "data": 2}}, Ranks(2, data=2)),
        (None, {"resources": {"gpus": 8}}, Ranks(8, gpus=8)),
        (None, {"resources": {"gpus": 8}, "parallelism": {"pipeline": 2}}, Ranks(4, 2, gpus=8)),
        (None, {"resources": {"gpus": 8}, "parallelism": {"data": 4}}, Ranks(2, data=4, gpus=8)),
        (None, {"resources": {"gpuType": "b200"}, "parallelism": {"data": 4}}, Ranks(data=4, gpus=4)),
        (None, {"resources": {"gpuType": "b200"}, "parallelism": {"tensor": 4, "pipeline": 2}}, Ranks(4, 2, gpus=8)),
        ({"resources": {"gpus": 8}}, {"parallelism": {"data": 4}}, Ranks(2, data=4, gpus=8)),
        ({"resources": {"gpus": 1}}, {"parallelism": {"tensor": 2, "data": 2}}, Ranks(2, data=2, gpus=4)),
        ({"resources": {"gpus": 1}}, {"parallelism": {"data": 4}}, Ranks(data=4, gpus=4)),
        # Several.
        (None, {"resources": {"gpus": 8}, "parallelism": {"tensor": 8, "pipeline": 2}}, Ranks(8, 2, nodes=2, gpus=8)),
        (None, {"resources": {"gpus": 8}, "parallelism": {"tensor": 16}}, Ranks(16, nodes=2, gpus=8)),
        (None, {"resources": {"gpus": 8}, "nodes": 2}, Ranks(8, 2, nodes=2, gpus=8)),
        (None, {"resources": {"gpus": 4}, "nodes": 2, "parallelism": {"pipeline": 4}}, Ranks(2, 4, nodes=2, gpus=4)),
        (None, {"resources": {"gpus": 1}, "nodes": 2}, Ranks(1, 2, nodes=2, gpus=1)),
        (None, {"nodes": 2}, Ranks(1, 2, nodes=2)),
        (None, {"nodes": 2, "parallelism": {"tensor": 2}}, Ranks(2, nodes=2)),
        (None, {"nodes": 2, "parallelism": {"tensor": 2, "pipeline": 2}}, Ranks(2, 2, nodes=2)),
        (None, {"resources": {"gpuType": "h100"}, "parallelism": {"tensor": 32}}, Ranks(32, nodes=2, gpus=16)),
        ({"gpusPerNode": 8}, {"parallelism": {"tensor": 8, "pipeline": 3}}, Ranks(8, 3, nodes=3, gpus=8)),
        ({"gpusPerNode": 8}, {"parallelism": {"tensor": 8}}, Ranks(8, gpus=8)),
        (None, {"resources": {"gpus": 8}, "disaggregation": {"dataPlane": "nccl"}}, Ranks(8, gpus=8)),
        (
            {"gpusPerNode": 8},
            {"disaggregation": {"dataPlane": "nccl"}, "parallelism": {"tensor": 16}},
            Ranks(16, nodes=2, gpus=8),
        ),
        (
            {"gpusPerNode": 8},
            {"disaggregation": {"dataPlane": "nccl"}, "parallelism": {"data": 16, "expert": True}},
            Ranks(data=16, nodes=2, gpus=8, expert=True),
        ),
        ({"gpusPerNode": 8}, {"parallelism": {"tensor": 12}}, Ranks(12, nodes=2, gpus=6)),
        ({"gpusPerNode": 8}, {"nodes": 2}, Ranks(1, 2, nodes=2, gpus=1)),
        ({"resources": {"gpus": 8}}, {"nodes": 2}, Ranks(8, 2, nodes=2, gpus=8)),
        ({"resources": {"gpus": 8}}, {"nodes": 2, "parallelism": {"pipeline": 2}}, Ranks(8, 2, nodes=2, gpus=8)),
        # A profile's ranks, as a whole or not at all.
        ({"gpusPerNode": 8, "parallelism": {"tensor": 8, "pipeline": 2}}, {}, Ranks(8, 2, nodes=2, gpus=8)),
        ({"parallelism": {"tensor": 8, "pipeline": 2}}, {"resources": {"gpus": 2}}, Ranks(2, gpus=2)),
        ({"parallelism": {"tensor": 8, "pipeline": 2}}, {"parallelism": {"tensor": 2}}, Ranks(2, gpus=2)),
        # Whole experts: of tensor ranks, on several nodes too, and of copies.
        (None, {"parallelism": {"tensor": 2, "expert": True}}, Ranks(2, expert=True)),
        (None, {"parallelism": {"tensor": 2, "expert": False}}, Ranks(2)),
        (None, {"resources": {"gpus": 8}, "parallelism": {"expert": True}}, Ranks(8, gpus=8, expert=True)),
        (
            None,
            {"resources": {"gpus": 8}, "parallelism": {"expert": True}, "nodes": 2},
            Ranks(8, 2, nodes=2, gpus=8, expert=True),
        ),
        (None, {"parallelism": {"tensor": 2, "expert": True}, "disaggregation": {}}, Ranks(2, expert=True)),
        (None, {"parallelism": {"data": 4, "expert": True}}, Ranks(data=4, expert=True)),
        (None, {"parallelism": {"tensor": 2, "data": 2, "expert": True}}, Ranks(2, data=2, expert=True)),
        (
            None,
            {"resources": {"gpus": 8}, "parallelism": {"data": 4, "expert": True}},
            Ranks(2, data=4, gpus=8, expert=True),
        ),
        (
            None,
            {"parallelism": {"data": 9, "expert": True}, "router": {"inferencePool": {}}},
            Ranks(data=9, expert=True),
        ),
        # Copies on several nodes: some on each, or each on several.
        (
            {"gpusPerNode": 8},
            {"parallelism": {"data": 32, "expert": True}},
            Ranks(data=32, nodes=4, gpus=8, expert=True),
        ),
        (
            {"gpusPerNode": 8},
            {"parallelism": {"tensor": 8, "pipeline": 2, "data": 2, "expert": True}},
            Ranks(8, 2, 2, nodes=4, gpus=8, expert=True),
        ),
        (
            None,
            {"resources": {"gpus": 8}, "nodes": 2, "parallelism": {"data": 4, "expert": True}},
            Ranks(4, data=4, nodes=2, gpus=8, expert=True),
        ),
        (None, {"nodes": 2, "parallelism": {"data": 2, "expert": True}}, Ranks(data=2, nodes=2, expert=True)),
        (None, {"nodes": 4, "parallelism": {"data": 2, "expert": True}}, Ranks(1, 2, 2, nodes=4, expert=True)),
        ({"parallelism": {"tensor": 8}}, {"parallelism": {"expert": True}}, Ranks(8, gpus=8, expert=True)),
        ({"parallelism": {"tensor": 8, "expert": True}}, {}, Ranks(8, gpus=8, expert=True)),
        ({"parallelism": {"tensor": 8, "expert": True}}, {"parallelism": {"expert": False}}, Ranks(8, gpus=8)),
        ({"parallelism": {"tensor": 8, "expert": True}}, {"resources": {"gpus": 2}}, Ranks(2, gpus=2)),
    ],
)
def test_what_is_not_written_follows_from_what_is(profiled: Any, spec: Any, expected: Ranks) -> None:
    found, _ = find(profiled, **spec)
    assert found == expected
    assert isinstance(found, Ranks)
    assert found.per_node * found.nodes == found.tensor * found.pipeline * found.data
    assert found.gpus in (0, found.per_node)


@pytest.mark.parametrize(
    ("profiled", "spec", "words"),
    [
        (None, {"resources": {"gpus": 4}, "parallelism": {"tensor": 2}}, "takes 2 GPUs, and resources.gpus is 4:"),
        (
            None,
            {"resources": {"gpus": 8}, "parallelism": {"tensor": 8, "pipeline": 2}, "nodes": 3},
            "takes 16 GPUs, and resources.gpus is 8 on each of 3 nodes: make them equal",
        ),
        (None, {"resources": {"gpus": 8}, "parallelism": {"pipeline": 3}}, "makes 3 stages and copies, which 8 GPUs"),
        (None, {"nodes": 3, "parallelism": {"tensor": 2}}, "makes 2 ranks, which 3 nodes cannot have in equal parts"),
        ({"gpusPerNode": 8}, {"parallelism": {"tensor": 17}}, "makes 17 ranks, which 3 nodes cannot have"),
        (None, {"parallelism": {"tensor": 16, "data": 4}}, "makes 64 ranks on one node, which has 16 at most"),
        (None, {"nodes": 2, "parallelism": {"data": 2}}, "with 2 nodes copies that share no experts are engines by"),
        (
            {"gpusPerNode": 8},
            {"parallelism": {"tensor": 8, "data": 2}},
            "leave out parallelism.data, and give spec.replicas; or give parallelism.expert",
        ),
        (
            None,
            {"nodes": 4, "parallelism": {"tensor": 2, "data": 6, "expert": True}},
            "has 6 copies of the model on 4 nodes: give each copy as many nodes, or each node as many copies",
        ),
        (
            None,
            {"resources": {"gpus": 1}, "parallelism": {"tensor": 2, "pipeline": 64}},
            "takes 128 nodes, and an engine has 64 at most",
        ),
        (None, {"disaggregation": {"dataPlane": "nccl"}, "parallelism": {"tensor": 2}}, "with 2 ranks K/V of several"),
        (
            {"parallelism": {"data": 9}},
            {"router": {"inferencePool": {}}},
            "with 9 data ranks an InferencePool has 8 ports, one for each data rank: lower it",
        ),
        (None, {"parallelism": {"expert": True}}, "gives all experts to one rank: raise parallelism.tensor or parall"),
        (None, {"parallelism": {"pipeline": 2, "expert": True}}, "gives all experts to one rank: raise parallelism.te"),
    ],
)
def test_ranks_that_do_not_add_up_are_refused_with_numbers(profiled: Any, spec: Any, words: str) -> None:
    found, _ = find(profiled, **spec)
    assert isinstance(found, str)
    assert words in found


def test_copies_that_share_experts_are_one_endpoint() -> None:
    apart, together = Ranks(data=4), Ranks(data=4, expert=True)
    assert (apart.endpoints, together.endpoints) == (4, 1)
    assert (Ranks(2, expert=True).together, Ranks(2, expert=True).apart, together.apart, apart.apart) == (
        False,
        2,
        4,
        1,
    )


def test_what_follows_is_told() -> None:
    _, notes = find({"gpusPerNode": 8, "parallelism": {"tensor": 8, "pipeline": 2}})
    assert notes == {
        "parallelism": "tensor 8, pipeline 2, from profile h100",
        "resources.gpus": "8, as there are 16 ranks on 2 nodes",
    }
    _, notes = find({"parallelism": {"tensor": 2, "expert": True}}, parallelism={"expert": True})
    assert notes["parallelism"] == "tensor 2, from profile h100"
    _, notes = find({"parallelism": {"tensor": 2, "expert": True}})
    assert notes["parallelism"] == "tensor 2, expert true, from profile h100"
    _, notes = find(resources={"gpus": 8}, parallelism={"tensor": 8, "pipeline": 2})
    assert notes == {"nodes": "2, as 16 ranks take 8 GPUs of each"}
    _, notes = find(resources={"gpus": 8}, nodes=2)
    assert notes == {
        "parallelism.pipeline": "2, as there are 2 nodes",
        "parallelism.tensor": "8, as there are 8 GPUs on each of 2 nodes",
    }
