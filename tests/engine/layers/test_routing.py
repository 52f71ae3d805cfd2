"""Which experts a token goes to, and how much each counts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_engine.layers.moe.routing import NOWHERE, GroupScore, Routes, Routing, Scoring, chooser, route
from torch import Tensor

from tests.example_counts import examples
from tests.fakes.native_kernels import native_libraries

Route = Callable[..., Routes]


def random_logits(rows: int, experts: int, seed: int) -> Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed))


def route_natively(logits_TE: Tensor, routing: Routing, correction_E: Tensor | None = None) -> Routes:
    return chooser(routing, native_libraries()[0], correction_E)(logits_TE)


WAYS = {"torch": route} | ({"compiled": route_natively} if native_libraries() else {})
each_way = pytest.mark.parametrize("route", WAYS.values(), ids=WAYS)


def as_dict(routes: Routes) -> list[dict[int, float]]:
    """Weight by expert, for each row."""
    pairs = zip(routes.experts_TK.tolist(), routes.weights_TK.tolist(), strict=True)
    return [dict(zip(experts, weights, strict=True)) for experts, weights in pairs]


@each_way
def test_softmax_keeps_what_all_experts_left(route: Route) -> None:
    (found,) = as_dict(route(torch.tensor([[0.0, math.log(2), math.log(5)]]), Routing(num_experts=3, top_k=2)))
    assert found == pytest.approx({2: 5 / 8, 1: 2 / 8})


@each_way
def test_renormalised_weights_add_up_to_the_scale(route: Route) -> None:
    routing = Routing(num_experts=3, top_k=2, renormalize=True, scale=3.0)
    (found,) = as_dict(route(torch.tensor([[0.0, math.log(2), math.log(5)]]), routing))
    assert found == pytest.approx({2: 15 / 7, 1: 6 / 7})


@each_way
def test_a_correction_chooses_and_does_not_weigh(route: Route) -> None:
    routing = Routing(num_experts=3, top_k=1, scoring="sigmoid", scale=2.0)
    (found,) = as_dict(route(torch.tensor([[0.0, 1.0, 2.0]]), routing, torch.tensor([1.0, 0.0, 0.0])))
    assert found == pytest.approx({0: 1.0})


@each_way
@pytest.mark.parametrize(("group_score", "expected"), [("max", {0, 1}), ("top2", {4, 5})])
def test_groups_are_ranked_first(route: Route, group_score: GroupScore, expected: set[int]) -> None:
    """The first of three groups has the best expert, the last the best two."""
    scores = torch.tensor([[0.01, 0.9, 0.02, 0.2, 0.6, 0.5]])
    routing = Routing(num_experts=6, top_k=2, scoring="sigmoid", num_groups=3, top_groups=1, group_score=group_score)
    (found,) = as_dict(route(scores.logit(), routing))
    assert set(found) == expected


@each_way
def test_sparsemixer_weighs_what_is_near(route: Route) -> None:
    """Of scores 4, 3.95 and 1 the first two are within a fiftieth of the best; then the second is alone."""
    routing = Routing(num_experts=3, top_k=2, scoring="sparsemixer", jitter=0.01)
    (found,) = as_dict(route(torch.tensor([[4.0, 3.95, 1.0]]), routing))
    assert found == pytest.approx({0: 1 / (1 + math.exp(-0.05)), 1: 1.0})


@each_way
def test_padding_goes_nowhere(route: Route) -> None:
    routes = route(random_logits(3, 4, 0), Routing(num_experts=4, top_k=2))
    padded = routes.without(torch.tensor([False, True, False]))
    assert padded.experts_TK[1].tolist() == [NOWHERE, NOWHERE]
    assert torch.equal(padded.experts_TK[::2], routes.experts_TK[::2])


@each_way
@given(
    st.integers(0, 2**31),
    st.sampled_from(("softmax", "sigmoid")),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from((torch.float32, torch.bfloat16)),
)
@settings(max_examples=examples(60))
def test_rows_are_alone(
    route: Route, seed: int, scoring: Scoring, top_groups: int, renormalize: bool, dtype: torch.dtype
) -> None:
    """Experts differ within a row and lie in few groups; a row with no numbers leaves the others as they are."""
    routing = Routing(
        num_experts=16, top_k=3, scoring=scoring, renormalize=renormalize, num_groups=4, top_groups=top_groups
    )
    logits, correction = random_logits(5, 16, seed).to(dtype), random_logits(1, 16, seed + 1)[0]
    routes = route(logits, routing, correction)
    for experts in routes.experts_TK.tolist():
        assert len(set(experts)) == 3
        assert len({expert // 4 for expert in experts}) <= top_groups
    if renormalize:
        torch.testing.assert_close(routes.weights_TK.sum(-1), torch.ones(5))
    logits[2] = torch.nan
    broken = route(logits, routing, correction)
    assert ((broken.experts_TK >= 0) & (broken.experts_TK < 16)).all()
    others = torch.tensor([0, 1, 3, 4])
    assert torch.equal(broken.experts_TK[others], routes.experts_TK[others])
    assert torch.equal(broken.weights_TK[others], routes.weights_TK[others])


@each_way
def test_sigmoids_that_are_all_one_are_told_apart_by_their_logits(route: Route) -> None:
    """As in Llama 4, whose routers have no correction."""
    routes = route(torch.tensor([[20.0, 30.0, 25.0]]), Routing(num_experts=3, top_k=1, scoring="sigmoid"))
    assert (routes.experts_TK.tolist(), routes.weights_TK.tolist()) == ([[1]], [[1.0]])


@pytest.mark.skipif(not native_libraries(), reason="the kernels of the CPU were not compiled")
@given(st.data())
@settings(max_examples=examples(150), deadline=None)
def test_compiled_kernels_choose_as_torch_does(data: st.DataObject) -> None:
    draw = data.draw
    num_groups, size = draw(st.integers(1, 8)), draw(st.integers(2, 33))
    top_groups = draw(st.integers(1, num_groups))
    routing = Routing(
        num_experts=num_groups * size,
        top_k=draw(st.integers(1, top_groups * size)),
        scoring=draw(st.sampled_from(("softmax", "sigmoid"))),
        renormalize=draw(st.booleans()),
        scale=draw(st.sampled_from((1.0, 2.5))),
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(("max", "top2"))),
    )
    rows, seed = draw(st.integers(0, 40)), draw(st.integers(0, 1000))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    logits = (3.0 * random_logits(rows, routing.num_experts, seed)).to(dtype)
    correction = draw(st.sampled_from((None, random_logits(1, routing.num_experts, seed + 1)[0])))
    expected, found = route(logits, routing, correction), route_natively(logits, routing, correction)
    # Of equals each may take another, so that weights are compared, of which there may be equals only.
    torch.testing.assert_close(found.weights_TK, expected.weights_TK, rtol=2e-6, atol=1e-7)
    if dtype == torch.float32:
        assert torch.equal(found.experts_TK, expected.experts_TK)
