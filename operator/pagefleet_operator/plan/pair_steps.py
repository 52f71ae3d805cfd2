"""The next steps of a disaggregated service whose engines are started and ended one by one, as on one machine.

`pair_rollout` says how many there are of each revision; this says which ones go, and under which numbers others come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pagefleet_protocol.inference_status import EngineRole

from pagefleet_operator.plan.pair_rollout import WHOLE, Count, Pair, RevisionSeen, Rollout, by_revision, next_counts
from pagefleet_operator.plan.roles import PAIR_ROLES
from pagefleet_operator.plan.rollout import Drain, Instance, Start, State, Step, next_steps
from pagefleet_operator.plan.workloads import Plan, Workload

Instances = Mapping[EngineRole, Sequence[Instance]]


def engine_steps(plan: Plan, existing: Instances) -> Mapping[EngineRole, tuple[Step, ...]]:
    """Return what to do now with engines of every kind.

    Args:
        existing: engines for whole requests, and of both parts.
    """
    pairs = {role: existing.get(role, ()) for role in PAIR_ROLES}
    engines = existing.get("engine", ())
    if not plan.parts and not any(pairs.values()):
        return {"engine": next_steps(plan.engine, engines)}
    counts = _counts(plan, existing)
    kept = counts.get(WHOLE, Pair()).decode
    steps: dict[EngineRole, tuple[Step, ...]] = {"engine": next_steps(replace(plan.engine, replicas=kept), engines)}
    stopped = _stopped(plan, [one for have in pairs.values() for one in have], kept)
    for place, (role, have) in enumerate(pairs.items()):
        numbers: dict[str, int] = {name: getattr(pair, role) for name, pair in counts.items()}
        part = plan.parts[place] if plan.parts and not stopped else None
        starts = _starts(part, have, numbers[part.revision]) if part else ()
        steps[role] = (*_drains(have, numbers), *starts)
    return steps


def _stopped(plan: Plan, pairs: Sequence[Instance], whole: int) -> bool:
    """Return whether the wanted revision fails while another one serves: `whole` engines of it, or pairs."""
    if not plan.parts:
        return False
    wanted = plan.parts[0].revision
    old = whole or any(one.revision != wanted and _is_live(one) for one in pairs)
    return bool(old) and any(one.failing for one in pairs if one.revision == wanted)


def _counts(plan: Plan, existing: Instances) -> Mapping[str, Pair]:
    """Return the engines of both parts that each revision has next."""
    live = ((kind, one) for kind, have in existing.items() for one in have if _is_live(one))
    seen = by_revision(
        Count(WHOLE, None, 1, one.state is State.READY)
        if kind == "engine"
        else Count(one.revision, kind, 1, one.state is State.READY)
        for kind, one in live
    )
    wanted = plan.parts[0].revision if plan.parts else WHOLE
    target = Pair(*(one.replicas for one in plan.parts)) if plan.parts else Pair(0, plan.engine.replicas)
    rollouts = [one.rollout for one in plan.parts or (plan.engine,)]
    bounds = Rollout(min(one.max_surge for one in rollouts), max(one.max_unavailable for one in rollouts))
    nothing = RevisionSeen(wanted, Pair(), Pair())
    return next_counts(target, seen.pop(wanted, nothing), tuple(seen.values()), bounds)


def _drains(have: Sequence[Instance], counts: Mapping[str, int]) -> tuple[Step, ...]:
    """Return what goes of each revision: those that do not serve first, then the highest numbers."""
    going: list[Step] = []
    for name in {one.revision for one in have}:
        live = [one for one in have if one.revision == name and _is_live(one)]
        by_worth = sorted(live, key=lambda one: (one.state is not State.READY, one.failing, one.number))
        going += [Drain(one.number) for one in by_worth[counts.get(name, 0) :]]
    return tuple(going)


def _starts(workload: Workload, have: Sequence[Instance], count: int) -> tuple[Step, ...]:
    """Return what comes. An engine holds its place until it is gone."""
    taken = {one.number for one in have}
    missing = count - sum(one.revision == workload.revision and _is_live(one) for one in have)
    room = workload.replicas + workload.rollout.max_surge - len(taken)
    free = (number for number in range(len(taken) + max(0, missing)) if number not in taken)
    return tuple(Start(number) for number, _ in zip(free, range(min(missing, room)), strict=False))


def _is_live(one: Instance) -> bool:
    return one.state is not State.DRAINING
