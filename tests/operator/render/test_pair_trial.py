"""A new revision of prefill and decode engines that is tried out in a cluster: both parts come, and both go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from pagefleet_operator.plan.canary import TrialFigures
from pagefleet_protocol.kube_names import LABEL_CANARY

from tests.operator.plan.kube_world import World, condition, service, told
from tests.operator.render.test_disaggregated import LINKED, counts
from tests.operator.render.test_trial import CANARY, EQUAL, WORSE, crash, phase

FOUR: Mapping[str, Any] = {"prefill": {"replicas": 2}, "decode": {"replicas": 4}}
OLD = (2, 4)


def spec(length: int = 1024, **more: Any) -> dict[str, Any]:
    return {"disaggregation": FOUR, "engine": {"maxModelLen": length}, "rollout": {"canary": CANARY}, **more}


def edited(figures: TrialFigures | None = EQUAL, **more: Any) -> tuple[World, str]:
    """Return a service that serves, and whose spec has just become another one, and the revision that serves."""
    world = World(service(**spec(**more)), kv_engines=LINKED)
    world.settle()
    world.trial = figures
    (old,) = counts(world)
    world.edit(**spec(2048, **more))
    return world, old


def until(world: World, wanted: str, most: int = 30) -> None:
    for _ in range(most):
        if phase(world) == wanted:
            return
        world.step()
        for role, least in zip(("prefill", "decode"), OLD, strict=True):
            assert sum(one.ready and one.role == role for one in world.of("engine")) >= least, "all old ones stay"
    raise AssertionError(f"{phase(world)} is no {wanted}")


def label(world: World) -> str:
    return str(world.children["Service", "qwen-engine"]["metadata"]["labels"].get(LABEL_CANARY, ""))


def new_of(world: World, old: str) -> tuple[str, tuple[int, int]]:
    ((name, pair),) = [(name, pair) for name, pair in counts(world).items() if name != old]
    return name, pair


def test_both_parts_are_tried_out_each_by_its_share_and_then_replace_the_old_ones() -> None:
    world, old = edited()
    world.step()
    new, pair = new_of(world, old)
    assert (phase(world), counts(world)[old], pair, label(world)) == ("Starting 1", OLD, (1, 1), f"{new}.0")
    until(world, "Analysing 1")
    assert (counts(world)[old], label(world)) == (OLD, f"{new}.10")
    assert world.status is not None
    assert told(world.status, "Progressing") == ("True", "Canary")
    until(world, "Analysing 2")
    assert (new_of(world, old), counts(world)[old], label(world)) == ((new, (1, 2)), OLD, f"{new}.50")
    until(world, "Promoted 2")
    for _ in range(40):
        world.step()
        assert sum(one.ready and one.role == "decode" for one in world.of("engine")) >= OLD[1]
    assert (counts(world), label(world)) == ({new: OLD}, "")
    assert told(world.status, "Progressing") == ("False", "Settled")
    world.settle()
    assert phase(world) == "Promoted 2"


def test_a_worse_pair_goes_back_and_stays_away_until_another_is_wanted() -> None:
    world, old = edited(WORSE)
    until(world, "RolledBack 1")
    world.settle()
    assert (counts(world), {one.revision for one in world.of("engine")}) == ({old: OLD}, {old})
    assert world.status is not None
    assert told(world.status, "Progressing") == ("False", "CanaryFailed")
    assert "10 of its 100 requests fail" in condition(world.status, "Degraded").message
    world.edit(**spec())
    world.settle()
    assert (phase(world), counts(world), label(world)) == ("", {old: OLD}, "")
    assert told(world.status, "Progressing") == ("False", "Settled")


def test_another_revision_takes_the_place_of_the_one_that_is_tried_out() -> None:
    world, old = edited()
    until(world, "Analysing 1")
    first, _ = new_of(world, old)
    world.edit(**spec(4096))
    world.step()
    second, pair = new_of(world, old)
    assert (second != first, pair, phase(world)) == (True, (1, 1), "Starting 1")
    until(world, "Promoted 2")
    world.settle()
    assert counts(world) == {second: OLD}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_part_that_crashes_takes_both_back(role: str) -> None:
    world, old = edited()
    world.step()
    new, _ = new_of(world, old)
    world.breaks = {new: lambda one: crash(one) if one.role == role else replace(one, ready=True)}
    until(world, "RolledBack 1", 6)
    world.settle()
    assert counts(world) == {old: OLD}


def test_a_change_of_numbers_alone_is_no_trial_and_counts_while_one_is_tried_out() -> None:
    world, old = edited()
    until(world, "Analysing 1")
    more = {"disaggregation": {"prefill": {"replicas": 3}, "decode": {"replicas": 5}}}
    world.edit(**spec(2048, **more))
    world.step()
    assert (counts(world)[old], phase(world)) == ((3, 5), "Analysing 1")
    world.edit(**spec(1024, **more))
    world.settle()
    assert (counts(world), phase(world)) == ({old: (3, 5)}, "")


def test_without_a_pair_that_serves_the_new_one_replaces_it_at_once() -> None:
    world = World(service(**spec()), kv_engines=LINKED)
    world.settle()
    world.pods = [replace(one, ready=False) if one.component == "engine" else one for one in world.pods]
    world.edit(**spec(2048))
    world.step()
    assert (phase(world), label(world)) == ("", "")


def test_from_engines_for_whole_requests_to_pairs_is_no_trial() -> None:
    world = World(service(rollout={"canary": CANARY}, replicas=2), kv_engines=LINKED)
    world.settle()
    world.edit(**spec())
    world.settle()
    assert (phase(world), list(counts(world).values())) == ("", [OLD])


@pytest.mark.parametrize("rolled", [1, 2, 3])
def test_an_edit_in_the_middle_of_a_rollout_takes_no_engine_that_serves(rolled: int) -> None:
    world = World(service(disaggregation=FOUR), kv_engines=LINKED)
    world.settle()
    (first,) = counts(world)
    world.trial = EQUAL
    world.edit(disaggregation=FOUR, engine={"maxModelLen": 1024})
    while sum(one.ready and one.role == "decode" and one.revision != first for one in world.of("engine")) < rolled:
        world.step()
    assert len({one.revision for one in world.of("engine") if one.ready}) == 2
    world.edit(**spec(2048))
    until(world, "Analysing 1")
    latest = label(world).partition(".")[0]
    until(world, "Promoted 2")
    for _ in range(40):
        world.step()
        assert sum(one.ready and one.role == "decode" for one in world.of("engine")) >= OLD[1]
    assert counts(world) == {latest: OLD}


def test_an_edit_on_the_way_from_whole_requests_to_pairs_takes_no_engine_that_serves() -> None:
    world = World(service(replicas=4), kv_engines=LINKED)
    world.settle()
    world.trial = EQUAL
    world.edit(disaggregation=FOUR)
    while not sum(one.ready and one.role == "decode" for one in world.of("engine")):
        world.step()
    world.edit(**spec(2048))
    for _ in range(40):
        world.step()
        assert sum(one.ready and one.role != "prefill" for one in world.of("engine")) >= OLD[1]
    assert (phase(world), list(counts(world).values())) == ("Promoted 2", [OLD])


def test_an_edit_on_the_way_from_pairs_to_whole_requests_takes_no_engine_that_serves() -> None:
    world = World(service(disaggregation=FOUR), kv_engines=LINKED)
    world.settle()
    world.trial = EQUAL
    world.edit(replicas=4)
    while not sum(one.ready and one.role is None for one in world.of("engine")):
        world.step()
    world.edit(replicas=4, engine={"maxModelLen": 2048}, rollout={"canary": CANARY})
    for _ in range(40):
        world.step()
        assert sum(one.ready and one.role != "prefill" for one in world.of("engine")) >= OLD[1]
    assert (phase(world), counts(world)) == ("Promoted 2", {})
