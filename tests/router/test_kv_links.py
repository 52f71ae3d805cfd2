"""Whose fault it is that K/V did not come."""

from __future__ import annotations

from pagefleet_router.scheduling.kv_links import KvLinks


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
