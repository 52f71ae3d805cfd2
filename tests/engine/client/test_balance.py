"""Which data rank gets a prompt: loads that add up, prefixes that stay, and nobody who is crowded for them."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from pagefleet_engine.client.balance import OUTPUT_TOKENS, PIECE, RECOMPUTE, Balance, RankRoom, Seat
from pagefleet_protocol.block_hash import PrefixScope

NOBODY = PrefixScope("")
ROOM = RankRoom(requests=8, tokens=100 * PIECE)


def balance(ranks: int = 2, room: RankRoom = ROOM) -> Balance:
    return Balance([room] * ranks)


def prompt(name: int, tokens: int = 4 * PIECE) -> list[int]:
    return [name * 1000 + position for position in range(tokens)]


def end(seat: Seat) -> None:
    seat.has_begun()
    while seat.outputs:
        seat.leave()


def figures(one: Balance) -> list[tuple[int, int, int]]:
    return [(load.outputs, load.held_tokens, load.prefill_tokens) for load in one.loads]


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(
            st.sampled_from(("place", "begin", "leave")), st.integers(0, 9), st.integers(1, 300), st.integers(1, 4)
        ),
        max_size=60,
    ),
)
def test_loads_are_those_of_the_open_outputs(ranks: int, moves: Sequence[tuple[str, int, int, int]]) -> None:
    one, seats = balance(ranks), list[Seat]()
    for move, which, tokens, outputs in moves:
        if move == "place":
            seats.append(one.place(prompt(which, tokens), outputs, NOBODY))
        elif seats:
            seat = seats[which % len(seats)]
            (seat.has_begun if move == "begin" else seat.leave)()
            seats = [seat for seat in seats if seat.outputs]
        for rank, load in enumerate(one.loads):
            own = [seat for seat in seats if seat.rank == rank]
            assert load.outputs == sum(seat.outputs for seat in own)
            assert load.held_tokens == sum(seat.outputs * seat.held_tokens for seat in own)
            assert load.prefill_tokens == sum(seat.prefill_tokens for seat in own)
    for seat in seats:
        end(seat)
    assert figures(one) == [(0, 0, 0)] * ranks


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 3 * PIECE))
def test_prompts_that_share_nothing_take_turns(ranks: int, count: int, tokens: int) -> None:
    for at_once in (False, True):
        one = balance(ranks)
        seats = []
        for number in range(count):
            seats.append(one.place(prompt(number, tokens), 1, NOBODY))
            if not at_once:
                end(seats[-1])
        given_to = [sum(seat.rank == rank for seat in seats) for rank in range(ranks)]
        assert max(given_to) - min(given_to) <= 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3 * PIECE)), min_size=1, max_size=40))
def test_a_conversation_stays_where_it_began(turns: list[tuple[int, int]]) -> None:
    one, homes = balance(3, RankRoom(8, 10**6)), dict[int, int]()
    told = {name: prompt(name, PIECE) for name in range(6)}
    for name, more in turns:
        told[name] = told[name] + prompt(name, more)
        seat = one.place(told[name], 1, NOBODY)
        assert seat.rank == homes.setdefault(name, seat.rank)
        end(seat)


@given(st.integers(2, 4), st.integers(1, 40), st.integers(1, 60))
def test_a_prefix_that_all_share_crowds_nobody(ranks: int, pieces: int, count: int) -> None:
    shared = prompt(0, pieces * PIECE)
    one = balance(ranks, RankRoom(1000, 10**6))
    for number in range(count):
        one.place([*shared, *prompt(1 + number, 8)], 1, NOBODY).has_begun()
    outputs = [load.outputs for load in one.loads]
    assert max(outputs) - min(outputs) <= RECOMPUTE * len(shared) // OUTPUT_TOKENS + 1


def test_a_rank_without_a_place_is_passed_over_for_one_that_has() -> None:
    known = prompt(0, 6 * PIECE)
    one = balance(2)
    home = one.place(known, ROOM.requests, NOBODY)
    home.has_begun()
    assert one.place(known, 1, NOBODY).rank != home.rank
    two = balance(2, RankRoom(100, 20 * PIECE))
    full = two.place(prompt(0, 19 * PIECE), 1, NOBODY)
    full.has_begun()
    assert two.place(prompt(0, 19 * PIECE), 1, NOBODY).rank == full.rank, "it is short of nothing there"
    assert two.place(prompt(1, 4 * PIECE), 1, NOBODY).rank != full.rank


def test_prompts_that_wait_count() -> None:
    one = balance(2)
    long, short = one.place(prompt(0, 20 * PIECE), 1, NOBODY), one.place(prompt(1, PIECE), 1, NOBODY)
    assert long.rank != short.rank
    assert [one.place(prompt(2 + number, PIECE), 1, NOBODY).rank for number in range(3)] == [short.rank] * 3


def test_only_what_may_be_shared_counts() -> None:
    one = balance(2)
    first = one.place(prompt(0), 1, PrefixScope("", salt="a"))
    end(first)
    other = one.place(prompt(0), 1, PrefixScope("", salt="b"))
    end(other)
    assert other.rank != first.rank
    assert one.place(prompt(0), 1, PrefixScope("", salt="b")).rank == other.rank


def test_prefixes_are_forgotten_with_the_caches() -> None:
    one = balance(2)
    first = one.place(prompt(0), 1, NOBODY)
    end(first)
    one.forget_prefixes()
    assert one.place(prompt(0), 1, NOBODY).rank != first.rank
    without = Balance([ROOM] * 2, prefix_caching=False)
    first = without.place(prompt(0), 1, NOBODY)
    end(first)
    assert without.place(prompt(0), 1, NOBODY).rank != first.rank


def test_what_a_cache_cannot_hold_any_more_is_forgotten_ends_first() -> None:
    one = balance(1)
    one._compares = True
    for number in range(30):
        end(one.place(prompt(number, 6 * PIECE), 1, NOBODY))
    assert len(one._sent[0]._pieces) == 100  # type: ignore[attr-defined]
    assert one.place(prompt(29, 6 * PIECE), 1, NOBODY).prefill_tokens == 0
    oldest_kept = one.place(prompt(13, 6 * PIECE), 1, NOBODY)  # 16 whole prompts fit, and 4 pieces of one more
    assert oldest_kept.prefill_tokens == 2 * PIECE


def test_more_outputs_go_where_the_prompt_is() -> None:
    one = balance(3)
    first = one.place(prompt(0), 1, NOBODY)
    for _ in range(20):
        assert one.place(prompt(0), 1, NOBODY, first.rank).rank == first.rank


def test_a_rank_whose_queue_is_full_gets_nothing_while_another_takes_it() -> None:
    two = balance(2, RankRoom(requests=1, tokens=100 * PIECE, queued=1))
    seats = [two.place(prompt(1, 20 * PIECE), 1, NOBODY) for _ in range(4)]
    assert [seat.rank for seat in seats].count(0) == 2
