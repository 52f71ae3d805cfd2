"""Pieces of prompts, the index over them, and the view of a body."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_router.engines.endpoints import EngineView, Snapshot, build_snapshot
from pagefleet_router.errors import Refusal
from pagefleet_router.exchange.view import NOBODY, Asker, view_request
from pagefleet_router.prefix.index import PrefixIndex
from pagefleet_router.prefix.knowledge import MAX_PIECES, PIECE_BYTES, hash_pieces
from pagefleet_router.request_view import RequestView


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(st.binary(max_size=3000), st.integers(0, 2999), st.binary(max_size=3000))
def test_pieces_agree_exactly_as_far_as_the_text_does(text: bytes, cut: int, other: bytes) -> None:
    second = text[:cut] + other
    a, b = hash_pieces(("m",), text), hash_pieces(("m",), second)
    shared = next(
        (n for n, (x, y) in enumerate(zip(text, second, strict=False)) if x != y), min(len(text), len(second))
    )
    assert len(a) == len(text) // PIECE_BYTES
    assert common(a, b) == shared // PIECE_BYTES


def test_a_scope_shares_with_no_other() -> None:
    text = b"x" * 2000
    chains = [
        hash_pieces(scope, text)
        for scope in (("m", None, None), ("n", None, None), ("m", b"t", None), ("m", None, "s"))
    ]
    assert len({piece for chain in chains for piece in chain}) == 4 * 3


def test_very_long_prompts_are_looked_at_up_to_a_limit() -> None:
    assert len(hash_pieces((), b"x" * (PIECE_BYTES * MAX_PIECES + 9999))) == MAX_PIECES


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 3), min_size=1, max_size=8)), max_size=60),
    st.integers(2, 40),
)
def test_the_index_matches_a_plain_model(steps: list[tuple[str, list[int]]], capacity: int) -> None:
    """Without eviction the match is the longest common prefix with anything sent; with it, never more."""
    index, sent = PrefixIndex(capacity), {"a": [], "b": []}  # type: ignore[var-annotated]
    for engine, words in steps:
        chain = hash_pieces((), b"".join(bytes([word]) * PIECE_BYTES for word in words))
        best = max((common(chain, other) for other in sent[engine]), default=0)
        matched = index.match(engine, chain)
        known = {piece for other in sent[engine] for piece in other}
        assert matched == best if len(known) <= capacity // 2 else matched <= best
        index.record(engine, chain)
        sent[engine].append(chain)
        index.check_integrity()
        assert len(index) <= capacity


def test_the_least_recently_used_goes_first_and_children_before_parents() -> None:
    index = PrefixIndex(6)
    index.record("a", (1, 2, 3))
    index.record("a", (11, 12, 13))
    index.record("a", (1, 2, 3))
    index.record("a", (21, 22))
    assert index.match("a", (1, 2, 3)) == 3
    assert index.match("a", (11, 12, 13)) == 1
    index.record("b", (1,))
    index.record("a", (31,))
    assert len(index) <= 6, "the share of an engine shrinks when another comes"
    index.keep_only(["b"])
    assert index.match("a", (31,)) == 0
    index.forget("b")
    assert len(index) == 0


def test_the_index_stays_within_its_memory() -> None:
    index, rng = PrefixIndex(500), random.Random(0)
    for number in range(3000):
        index.record(f"e{number % 4}", tuple(rng.getrandbits(60) for _ in range(20)))
    assert len(index) <= 500


SERVED = build_snapshot([EngineView(Endpoint("a", "http://a:1", "m"), ready=True)])
LONG = [{"role": "system", "content": "s" * 5000}, {"role": "user", "content": "u" * 500}]


def view(asker: Asker = NOBODY, snapshot: Snapshot = SERVED, **body: object) -> RequestView:
    return view_request(json.dumps({"model": "m", **body}).encode(), snapshot, asker, True)


def test_a_growing_conversation_keeps_its_pieces() -> None:
    first = view(messages=LONG).pieces
    second = view(
        messages=[*LONG, {"role": "assistant", "content": "a" * 700}, {"role": "user", "content": "b"}]
    ).pieces
    assert len(first) == 10
    assert common(first, second) >= len(first) - 1


def test_what_may_not_share_does_not() -> None:
    chains = [
        view(messages=LONG).pieces,
        view(messages=LONG, cache_salt="x").pieces,
        view(Asker("tenant"), messages=LONG).pieces,
        view(messages=LONG, tools=[{"type": "function"}]).pieces,
        view(prompt="s" * 5000).pieces,
    ]
    assert len({chain[0] for chain in chains}) == len(chains)
    assert view(messages=LONG, temperature=0.5, stream=True).pieces == chains[0]


def test_without_prefixes_nothing_is_hashed() -> None:
    body = json.dumps({"model": "m", "messages": LONG}).encode()
    assert view_request(body, SERVED, NOBODY, with_pieces=False).pieces == ()


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"{", 400), (b"5", 400), (b'"x"', 400), (b'{"model":"x"}', 404), (b'{"model":""}', 404),
     (b'{"model":"m"} trailing', 400), (b"\xef\xbb\xbf{}", 400), (b'{"model":' + b"[" * 50_000, 400)],
)  # fmt: skip
def test_bodies_that_are_refused(body: bytes, status: int) -> None:
    with pytest.raises(Refusal) as caught:
        view_request(body, SERVED, NOBODY, True)
    assert caught.value.status == status
    assert len(caught.value.message) < 200


def test_no_model_at_all() -> None:
    with pytest.raises(Refusal) as caught:
        view_request(b'{"model":"m"}', build_snapshot([]), NOBODY, True)
    assert caught.value.status == 503
