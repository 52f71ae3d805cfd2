"""From slices to engines: conditions, families, duplicates, and what cannot be used."""

from __future__ import annotations

import copy
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_router.config import check_engine_url
from pagefleet_router.discovery.endpoint_slices import EndpointSlice, engines_of, faults_of
from pagefleet_router.discovery.slice_api import ApiServerError
from pagefleet_router.discovery.slice_cache import SliceCache

from tests.fakes.slice_server import Slice, leaving, make_slice, pod


def decode(one: Slice) -> EndpointSlice:
    return msgspec.json.decode(json.dumps(one).encode(), type=EndpointSlice)


def engines(*slices: Slice) -> list[tuple[str, str, bool]]:
    return [(one.id, one.url, one.draining) for one in engines_of(map(decode, slices), "m")]


@pytest.mark.parametrize(
    ("ready", "serving", "terminating", "state"),
    [
        (True, True, False, "used"),
        (True, None, None, "used"),
        (None, None, None, "used"),
        (True, False, False, "used"),
        (False, False, False, "coming"),
        (False, True, False, "coming"),
        (False, None, None, "coming"),
        (False, True, True, "draining"),
        (False, None, True, "draining"),
        (True, True, True, "draining"),
        (False, False, True, "absent"),
    ],
)
def test_conditions(ready: bool | None, serving: bool | None, terminating: bool | None, state: str) -> None:
    one = make_slice("s", pod("p", "10.0.0.1", ready=ready, serving=serving, terminating=terminating))
    url, coming, draining = "http://10.0.0.1:8000", state == "coming", state == "draining"
    assert engines_of([decode(one)], "m") == (
        () if state == "absent" else (Endpoint("p", url, "m", draining=draining, coming=coming),)
    )


def test_the_fields_of_an_engine() -> None:
    (found,) = engines_of([decode(make_slice("s", pod("qwen-engine-7d9f-abcde", "10.1.2.3")))], "org/name")
    assert found == Endpoint("qwen-engine-7d9f-abcde", "http://10.1.2.3:8000", "org/name")


@pytest.mark.parametrize(
    ("label", "share"),
    [("ab12.5", OnTrial("ab12", 5)), ("ab12.0", OnTrial("ab12", 0)), ("ab12.100", None), ("ab12", None), (".5", None)],
)
def test_pods_of_a_revision_on_trial_are_known_by_their_names(label: str, share: OnTrial | None) -> None:
    one = make_slice("s", pod("qwen-engine-ab12-7d9f-abcde", "10.0.0.1"), pod("qwen-engine-7d9f-abcde", "10.0.0.2"))
    one["metadata"]["labels"] |= {"kubernetes.io/service-name": "qwen-engine", "pagefleet.dev/canary": label}
    assert [found.on_trial for found in engines_of([decode(one)], "m")] == [None, share]


def test_a_long_name_leaves_no_room_for_what_the_pods_of_a_trial_have_behind_their_revision() -> None:
    service, revision = f"{'a' * 40}-engine", "0123456789"  # Kubernetes cuts at 58, and adds five
    one = make_slice("s", pod(f"{service}-{revision}abcde", "10.0.0.1"), pod(f"{service}-7d9f-abcde", "10.0.0.2"))
    one["metadata"]["labels"] |= {"kubernetes.io/service-name": service, "pagefleet.dev/canary": f"{revision}.5"}
    assert [found.on_trial for found in engines_of([decode(one)], "m")] == [OnTrial(revision, 5), None]


@pytest.mark.parametrize("stem", ["qwen", "a" * 40])
def test_both_parts_of_a_trial_are_known_by_their_names(stem: str) -> None:
    revisions = ("0123456789", "abcdef0123")
    names = [f"{stem}-{role}-{one}-7d9f"[:58] + "-abcde" for role in ("prefill", "decode") for one in revisions]
    one = make_slice("s", *(pod(name, f"10.0.0.{number}") for number, name in enumerate(names, 1)))
    label = {"pagefleet.dev/canary": f"{revisions[0]}.5"}
    one["metadata"]["labels"] |= {"kubernetes.io/service-name": f"{stem}-engine", **label}
    found = {found.id: found.on_trial for found in engines_of([decode(one)], "m")}
    assert [found[name] for name in names] == [OnTrial(revisions[0], 5), None] * 2


def test_slices_are_merged_in_a_fixed_order() -> None:
    one, two = make_slice("s1", pod("b", "10.0.0.2"), pod("a", "10.0.0.1")), make_slice("s2", pod("c", "10.0.0.3"))
    assert [found[0] for found in engines(one, two)] == ["a", "b", "c"]
    assert engines(one, two) == engines(two, one)


def test_a_pod_in_two_slices_is_one_engine_and_the_better_news_counts() -> None:
    old, new = make_slice("s1", leaving("a", "10.0.0.1")), make_slice("s2", pod("a", "10.0.0.1"))
    assert engines(old, new) == engines(new, old) == [("a", "http://10.0.0.1:8000", False)]


def test_both_families() -> None:
    six = make_slice("s6", pod("a", "fd00::1"), pod("only-six", "fd00:0:0::2"), family="IPv6")
    four = make_slice("s4", pod("a", "10.0.0.1"))
    expected = [("a", "http://10.0.0.1:8000", False), ("only-six", "http://[fd00::2]:8000", False)]
    assert engines(six, four) == engines(four, six) == expected
    assert check_engine_url("http://[fd00::2]:8000") == ("fd00::2", 8000)


def test_a_pod_that_leaves_in_one_family_and_serves_in_the_other_is_used() -> None:
    six = make_slice("s6", pod("a", "fd00::1"), family="IPv6")
    assert engines(six, make_slice("s4", leaving("a", "10.0.0.1"))) == [("a", "http://[fd00::1]:8000", False)]


def test_an_address_without_a_pod_is_its_own_id() -> None:
    endpoint = pod("x", "10.0.0.9")
    del endpoint["targetRef"]
    assert engines(make_slice("s", endpoint)) == [("10.0.0.9:8000", "http://10.0.0.9:8000", False)]


def test_each_data_rank_of_a_pod_is_an_engine() -> None:
    numbers = {"http": 8000, "http-1": 8001, "state": 8002, "http-x": 9}
    ports = [{"name": name, "port": port} for name, port in numbers.items()]
    one = {**make_slice("s", pod("a", "10.0.0.1"), leaving("b", "10.0.0.2")), "ports": ports}
    found = [
        ("a", "http://10.0.0.1:8000", False), ("a.1", "http://10.0.0.1:8001", False),
        ("b", "http://10.0.0.2:8000", True), ("b.1", "http://10.0.0.2:8001", True),
    ]  # fmt: skip
    assert engines(one) == found
    before = make_slice("t", pod("c", "10.0.0.3"))
    assert engines(one, before) == [*found, ("c", "http://10.0.0.3:8000", False)], "pods of one rank beside them"
    assert not faults_of({"s": decode(one)})


@pytest.mark.parametrize(
    ("ports", "chosen"),
    [
        ([{"name": "metrics", "port": 9}, {"name": "http", "port": 8001}], 8001),
        ([{"name": "other", "port": 7}], 7),
        ([{"port": 7, "protocol": "TCP"}], 7),
        ([{"name": "a", "port": 1}, {"name": "b", "port": 2}], None),
        ([{"name": "http", "port": 5, "protocol": "UDP"}], None),
        ([{"name": "http"}], None),
        ([], None),
        (None, None),
    ],
)
def test_the_port(ports: list[dict[str, Any]] | None, chosen: int | None) -> None:
    one = {**make_slice("s", pod("a", "10.0.0.1")), "ports": ports}
    expected = [] if chosen is None else [("a", f"http://10.0.0.1:{chosen}", False)]
    assert engines(one) == expected
    assert bool(faults_of({"s": decode(one)})) == (chosen is None)


@pytest.mark.parametrize(
    "damage",
    [
        {"addresses": []},
        {"addresses": ["qwen.example"]},
        {"addresses": ["10.0.0.1:80@evil"]},
        {"addresses": ["fe80::1%eth0"]},
        {"targetRef": {"kind": "Pod", "name": "a\r\nx-evil: 1"}},
        {"targetRef": {"kind": "Pod"}},
    ],
)
def test_an_odd_endpoint_is_left_out_and_named(damage: Slice) -> None:
    good = pod("good", "10.0.0.2")
    one = make_slice("s", {**pod("bad", "10.0.0.1"), **damage}, good)
    assert engines(one) == [("good", "http://10.0.0.2:8000", False)]
    assert faults_of({"s": decode(one)}) == ("s: an endpoint has no usable address or name",)
    assert faults_of({"s": decode(make_slice("s", good))}) == ()


def test_names_in_the_place_of_addresses_are_not_followed() -> None:
    one = make_slice("s", pod("a", "engine.example"), family="FQDN")
    assert engines(one) == []
    assert "FQDN" in faults_of({"s": decode(one)})[0]


def test_a_service_without_pods_is_empty_and_no_fault() -> None:
    one = {**make_slice("s"), "endpoints": None, "ports": None}
    assert engines(one) == []
    assert faults_of({"s": decode(one)}) == ()


def listed(*items: object, version: str = "7") -> bytes:
    return json.dumps({"kind": "EndpointSliceList", "metadata": {"resourceVersion": version}, "items": items}).encode()


def event(kind: str, one: object) -> bytes:
    return json.dumps({"type": kind, "object": one}).encode()


def versioned(one: Slice, version: str) -> Slice:
    return {**one, "metadata": {**one["metadata"], "resourceVersion": version}}


def test_a_list_then_events() -> None:
    cache = SliceCache()
    a, b = make_slice("a", pod("p")), make_slice("b", pod("q"))
    cache.replace(listed(a))
    assert (set(cache.slices), cache.version) == ({"a"}, "7")
    cache.apply(event("ADDED", versioned(b, "8")))
    cache.apply(event("MODIFIED", versioned(make_slice("a", leaving("p")), "9")))
    assert [one.draining for one in engines_of(cache.slices.values(), "m")] == [True, False]
    cache.apply(event("DELETED", versioned(a, "10")))
    cache.apply(event("DELETED", versioned(a, "11")))
    assert (set(cache.slices), cache.version) == ({"b"}, "11")
    cache.apply(event("BOOKMARK", {"metadata": {"resourceVersion": "20"}}))
    cache.apply(event("SOMETHING-NEW", {"metadata": {"resourceVersion": "21"}}))
    assert (set(cache.slices), cache.version) == ({"b"}, "21")
    cache.replace(listed(version="30"))
    assert (cache.slices, cache.version) == ({}, "30")


def test_malformed_slices_are_skipped_and_mentioned_once(caplog: pytest.LogCaptureFixture) -> None:
    good = make_slice("good", pod("p"))
    bad = {**make_slice("bad", pod("q")), "endpoints": "none"}
    cache = SliceCache()
    for _ in range(3):
        cache.replace(listed(bad, good, 7, {}))
    assert set(cache.slices) == {"good"}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 3
    assert "bad" in messages[0]
    assert any("one without a name" in message for message in messages)
    cache.apply(event("MODIFIED", versioned({**good, "endpoints": 5}, "8")))
    assert set(cache.slices) == {"good"}, "what was known of it stays"
    assert cache.version == "8", "and the watch goes on behind it"
    assert "good" in caplog.records[-1].getMessage()


@pytest.mark.parametrize(
    "answer", [b"", b"<html>", b"[]", b"{}", b'{"metadata": {}, "items": []}', b"\xff", b'{"items": 5}']
)
def test_what_is_no_list_is_refused_and_changes_nothing(answer: bytes) -> None:
    cache = SliceCache()
    cache.replace(listed(make_slice("a", pod("p"))))
    with pytest.raises(ApiServerError, match="no list"):
        cache.replace(answer)
    assert set(cache.slices) == {"a"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (event("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}), "has forgotten"),
        (event("ERROR", {"code": 504, "reason": "Timeout"}), "504 Timeout"),
        (event("ERROR", "?"), "ends the watch"),
        (b"<html>", "is none"),
        (b"7", "is none"),
    ],
)
def test_an_event_that_ends_the_watch_asks_for_a_list(line: bytes, says: str) -> None:
    with pytest.raises(ApiServerError, match=says) as caught:
        SliceCache().apply(line)
    assert caught.value.relist


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 99999) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PLACES: list[tuple[str | int, ...]] = [
    ("addressType",), ("ports",), ("ports", 0), ("ports", 0, "port"), ("endpoints",), ("endpoints", 0),
    ("endpoints", 0, "addresses"), ("endpoints", 0, "addresses", 0), ("endpoints", 0, "conditions"),
    ("endpoints", 0, "conditions", "ready"), ("endpoints", 0, "targetRef"), ("endpoints", 0, "targetRef", "name"),
    ("metadata",), ("metadata", "name"),
]  # fmt: skip


@given(st.sampled_from(PLACES), JSON)
def test_no_damage_to_one_slice_harms_another(place: tuple[str | int, ...], value: Any) -> None:
    damaged: Any = copy.deepcopy(make_slice("bad", pod("b", "10.0.0.1")))
    inner = damaged
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    cache = SliceCache()
    cache.replace(listed(damaged, make_slice("good", pod("g", "10.0.0.2"))))
    found = engines_of(cache.slices.values(), "m")
    assert "http://10.0.0.2:8000" in [one.url for one in found]
    for one in found:
        check_engine_url(one.url)
        assert one.id.isascii()
        assert one.id.isprintable()
