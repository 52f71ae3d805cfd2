"""Whose fault it is that K/V did not come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.kv_handoff import KvRole
from pagefleet_router.engines.endpoints import EngineView
from pagefleet_router.scheduling.kv_links import KvLinks

from tests.fakes.pair_fleet import pair_facts


def test_a_sender_is_to_blame_while_the_k_v_of_others_comes() -> None:
    links = KvLinks()
    assert links.lost("p0", "d0")
    assert links.lost("p0", "d0")
    assert links.lost("p0", "d1"), "of each decode engine apart"
    links.came("d0")
    assert links.lost("p1", "d0"), "p0 is forgiven"


def test_an_engine_that_nobody_reaches_is_cut_off_itself() -> None:
    links = KvLinks()
    links.lost("p0", "d0")
    assert not links.lost("p1", "d0")
    assert not links.lost("p0", "d0")
    links.came("d0")
    assert links.lost("p0", "d0")


def test_engines_that_left_say_nothing() -> None:
    links = KvLinks()
    links.lost("p0", "d0")
    links.forget("p0")
    assert links.lost("p1", "d0")
    links.forget("d0")
    assert links.lost("p2", "d0")


def names(groups: Iterable[tuple[Sequence[EngineView], Sequence[EngineView]]]) -> list[tuple[str, str]]:
    """Return decode engines and prefill engines of each group."""
    return [("".join(d.id for d in decodes), "".join(p.id for p in prefills)) for decodes, prefills in groups]


def engine(name: str, role: KvRole, life: int = 0) -> EngineView:
    return EngineView(Endpoint(name, f"http://{name}:1", "m"), facts=pair_facts(f"{name}{life}", role))


P = [engine("p", "prefill"), engine("q", "prefill")]
D = [engine("d", "decode"), engine("e", "decode")]


def test_all_may_pass_k_v_to_all_at_first() -> None:
    assert names(KvLinks().groups(D, P, 0.0)) == [("de", "pq")]


def test_two_that_were_parted_meet_again_when_the_time_is_over() -> None:
    links = KvLinks()
    links.part(P[0], D[0], 10.0)
    assert names(links.groups(D, P, 9.9)) == [("d", "q"), ("e", "pq")]
    assert names(links.groups(D, P[:1], 9.9)) == [("e", "p")], "nobody is left for d"
    assert names(links.groups(D[:1], P[:1], 9.9)) == []
    assert names(links.groups(D, P, 10.0)) == [("de", "pq")]


def test_an_engine_that_began_anew_is_tried_at_once() -> None:
    links = KvLinks()
    links.part(P[0], D[0], 10.0)
    again = engine("d", "decode", life=1)
    assert names(links.groups([again], P, 0.0)) == [("d", "pq")]


def test_an_engine_that_is_left_alone_passes_nothing_with_anybody() -> None:
    links = KvLinks()
    links.leave_alone(P[0], 10.0)
    links.leave_alone(D[1], 20.0)
    assert names(links.groups(D, P, 9.0)) == [("d", "q")]
    assert names(links.groups(D, P, 19.0)) == [("d", "pq")]
    assert names(links.groups([*D, engine("e", "decode", life=1)], P, 19.0)) == [("de", "pq")]
    assert names(links.groups(D, P, 20.0)) == [("de", "pq")]
