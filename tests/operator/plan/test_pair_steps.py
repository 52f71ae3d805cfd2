"""Prefill and decode engines of one machine: which start, which go, step by step, with engines that take their time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagefleet_operator.plan.pair_steps import engine_steps
from pagefleet_operator.plan.resolve import resolve
from pagefleet_operator.plan.roles import PAIR_ROLES, is_disaggregated, role_view
from pagefleet_operator.plan.rollout import Drain, Instance, State
from pagefleet_operator.plan.verdict import Refusal
from pagefleet_operator.plan.workloads import PartSettings, Plan, plan_workloads
from pagefleet_protocol.inference_status import EngineRole
from pagefleet_protocol.resource_documents import parse_inference_service

from tests.example_counts import examples
from tests.fakes.resource_documents import service_document

Machine = dict[EngineRole, list[Instance]]


def plan(**spec: Any) -> Plan:
    service = parse_inference_service(service_document(**spec))
    resolved = resolve(service, {}, None)
    assert not isinstance(resolved, Refusal)
    parts = {}
    for role in PAIR_ROLES if is_disaggregated(service) else ():
        own = resolve(role_view(service, role), {}, None)
        assert not isinstance(own, Refusal)
        parts[role] = PartSettings(own)
    return plan_workloads(service, resolved, "builtin://tiny", parts=parts)


def pairs(prefill: int, decode: int, *args: str, **rollout: int) -> Plan:
    both = {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}}
    return plan(disaggregation=both, engine={"args": list(args)}, rollout=rollout)


def revisions(machine: Machine) -> dict[str, tuple[int, int]]:
    """Engines of both parts that do not end, by revision."""
    live = {role: [one for one in machine.get(role, []) if one.state is not State.DRAINING] for role in PAIR_ROLES}
    names = {one.revision for have in live.values() for one in have}
    counts = {name: [sum(one.revision == name for one in live[role]) for role in PAIR_ROLES] for name in names}
    return {name: (pair[0], pair[1]) for name, pair in counts.items()}


def look(wanted: Plan, machine: Machine, broken: str = "") -> bool:
    """Take the next steps, then let everything get ready or end; return whether anything changed."""
    before = {role: list(have) for role, have in machine.items()}
    workloads = {one.role: one for one in (wanted.engine, *wanted.parts)}
    for role, steps in engine_steps(wanted, machine).items():
        have = machine.setdefault(role, [])
        for step in steps:
            if isinstance(step, Drain):
                have[:] = [replace(one, state=State.DRAINING) if one.number == step.number else one for one in have]
            else:
                assert step.number not in {one.number for one in have}
                have.append(Instance(step.number, workloads[role].revision, State.STARTING))
    return {role: have for role, have in machine.items() if have} != {
        role: have for role, have in before.items() if have
    }


def work(machine: Machine, broken: str = "") -> None:
    for have in machine.values():
        have[:] = [one for one in have if one.state is not State.DRAINING]
        for place, one in enumerate(have):
            state = State.FAILED if one.revision == broken else State.READY
            have[place] = replace(one, state=state, served=state is State.READY, restarts=int(state is State.FAILED))


def settle(wanted: Plan, machine: Machine, broken: str = "", most: int = 80) -> list[dict[str, tuple[int, int]]]:
    steps = []
    for _ in range(most):
        changed = look(wanted, machine)
        before = {role: list(have) for role, have in machine.items()}
        work(machine, broken)
        steps.append(revisions(machine))
        if not changed and machine == before:
            return steps
    raise AssertionError(f"it goes on for ever: {steps[-2:]}")


def test_both_parts_start_at_once() -> None:
    machine: Machine = {}
    wanted = pairs(2, 3)
    assert settle(wanted, machine)[-1] == {wanted.parts[0].revision: (2, 3)}
    assert [one.number for one in machine["decode"]] == [0, 1, 2]


@pytest.mark.parametrize("rollout", [{}, {"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 0, "maxUnavailable": 2}])
def test_a_rollout_keeps_pairs(rollout: dict[str, int]) -> None:
    machine: Machine = {}
    settle(pairs(2, 2, **rollout), machine)
    wanted = pairs(2, 2, "--seed", "1", **rollout)
    steps = settle(wanted, machine)
    for step in steps:
        assert all((prefill > 0) == (decode > 0) for prefill, decode in step.values()), steps
        assert all(sum(pair[part] for pair in step.values()) <= 2 + rollout.get("maxSurge", 1) for part in (0, 1))
    assert steps[-1] == {wanted.parts[0].revision: (2, 2)}


def test_a_revision_that_fails_stops_the_rollout_until_it_is_undone() -> None:
    machine: Machine = {}
    old, bad = pairs(2, 2), pairs(2, 2, "--seed", "x")
    settle(old, machine)
    steps = settle(bad, machine, broken=bad.parts[0].revision)
    assert steps[-1] == {old.parts[0].revision: (2, 2), bad.parts[0].revision: (1, 1)}
    assert settle(old, machine)[-1] == {old.parts[0].revision: (2, 2)}


def test_from_whole_requests_and_back() -> None:
    machine: Machine = {}
    whole = plan(replicas=2)
    settle(whole, machine)
    settle(pairs(1, 2), machine)
    assert [len(machine[role]) for role in ("engine", "prefill", "decode")] == [0, 1, 2]
    settle(whole, machine)
    assert [len(machine[role]) for role in ("engine", "prefill", "decode")] == [2, 0, 0]


def test_none_of_both() -> None:
    machine: Machine = {}
    settle(pairs(1, 1), machine)
    assert settle(pairs(0, 0), machine)[-1] == {}


def test_a_change_of_one_part_changes_the_revision_of_both() -> None:
    one = plan(disaggregation={})
    other = plan(disaggregation={"decode": {"args": ["--max-num-seqs", "4"]}})
    more = plan(disaggregation={"decode": {"replicas": 5}})
    assert one.parts[0].revision == one.parts[1].revision == more.parts[1].revision
    assert other.parts[0].revision == other.parts[1].revision != one.parts[0].revision
    assert [part.name for part in one.parts] == ["qwen-prefill", "qwen-decode"]
    assert one.engine.replicas == 0
    flags = {part.role: part.args[part.args.index("--kv-role") + 1] for part in one.parts}
    assert flags == {"prefill": "prefill", "decode": "decode"}


@settings(max_examples=examples(40))
@given(
    counts=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2)), min_size=1, max_size=4),
    pauses=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_however_often_it_is_edited_it_ends_with_the_last(
    counts: list[tuple[int, int, int]], pauses: list[int]
) -> None:
    machine: Machine = {}
    for (prefill, decode, seed), pause in zip(counts, pauses, strict=False):
        wanted = pairs(prefill, decode, "--seed", str(seed))
        for _ in range(pause):
            look(wanted, machine)
            work(machine)
    assert settle(wanted, machine)[-1] == {wanted.parts[0].revision: (prefill, decode)}
