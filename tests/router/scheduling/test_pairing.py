"""Who computes a prompt: the choice between one engine and two, by cost."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_protocol.kv_handoff import KvRole
from pagefleet_router.engines.endpoints import EndpointTable, EngineView, build_snapshot
from pagefleet_router.engines.rates import EngineRates, TransferFigures, TransferRates
from pagefleet_router.request_view import RequestView
from pagefleet_router.scheduling.auto import Auto
from pagefleet_router.scheduling.cost import late_seconds, local_seconds, remote_seconds
from pagefleet_router.scheduling.in_flight import InFlight
from pagefleet_router.scheduling.kv_links import KvLinks
from pagefleet_router.scheduling.pairing import Pairing
from pagefleet_router.scheduling.policies import make_policy
from pagefleet_router.scheduling.policy import Choice

from tests.fakes.pair_fleet import pair_facts, with_ranks


class Known:
    """Prefixes that a test says the engines have, or their ranks."""

    def __init__(self, **tokens: int | list[int]) -> None:
        self.tokens = tokens

    def cached_tokens(self, engines: Sequence[EngineView], request: RequestView) -> list[int]:
        return [max(self.cached_by_rank(engine, request)) for engine in engines]

    def cached_by_rank(self, engine: EngineView, request: RequestView) -> list[int]:
        tokens = self.tokens.get(engine.id, 0)
        return [tokens] if isinstance(tokens, int) else tokens

    def sent(self, engine: EngineView, request: RequestView, rank: int | None = None) -> None:
        raise AssertionError("a choice notes nothing")

    def lost(self, engine_id: str) -> None:
        raise AssertionError("a choice forgets nothing")


def engine(name: str, role: KvRole | None, requests: int = 0, queued: int = 0, kind: str = "c") -> EngineView:
    facts = pair_facts(name, role, kind * 64)
    view = EngineView(Endpoint(name, f"http://{name}:1", "m"), ready=True, facts=facts, rates=EngineRates())
    for number in range(requests):
        view.tally.begin(queued if number == 0 else 0, 0.0)
    view.tally.recent = view.tally.stored = 0.0
    return view


def chosen(
    engines: list[EngineView], tokens: int = 4000, known: Known | None = None, threshold: int = 256, free: bool = True
) -> Choice:
    """Return what is chosen among the usable engines of a snapshot."""
    known = known or Known()
    clock = lambda: 100.0  # noqa: E731
    pairing = Pairing(Auto(known, random.Random(0), clock), known, threshold, free, clock, random.Random(0))
    snapshot = build_snapshot(engines)
    view = RequestView("m", num_tokens=tokens, stream=True, may_split=True)
    return pairing.choose(view, snapshot.usable["m"], snapshot.prefills.get("m", ()), KvLinks())


def ids(choice: Choice) -> tuple[str | None, str]:
    return (choice.prefill.engine.id if choice.prefill else None, choice.engine.id)


P0, P1, D0, D1 = engine("p0", "prefill"), engine("p1", "prefill"), engine("d0", "decode"), engine("d1", "decode")


@pytest.mark.parametrize(
    ("tokens", "cached", "threshold", "expected"),
    [
        (4000, 0, 256, ("p0", "d0")),
        (255, 0, 256, (None, "d0")),
        (257, 0, 256, ("p0", "d0")),
        (4000, 3800, 256, (None, "d0")),
        (4000, 3800, 100, ("p0", "d0")),
        (100_000, 0, 200_000, (None, "d0")),
        (0, 0, 0, (None, "d0")),
    ],
)
def test_only_prompts_over_the_threshold_are_split(
    tokens: int, cached: int, threshold: int, expected: tuple[str | None, str]
) -> None:
    assert ids(chosen([P0, D0], tokens, Known(d0=cached, p0=cached), threshold)) == expected


def of_ranks(name: str, role: KvRole) -> EngineView:
    """An engine of two data ranks behind one port."""
    view = engine(name, role)
    assert view.facts is not None
    return replace(view, facts=with_ranks(view.facts, 2))


def test_a_prompt_goes_to_the_rank_that_has_its_beginning_until_that_one_has_more_to_do() -> None:
    prefill, decode = of_ranks("p", "prefill"), of_ranks("d", "decode")
    known = Known(p=[0, 1000], d=[500, 0])
    choice = chosen([prefill, decode], known=known)
    assert choice.prefill is not None
    assert (choice.prefill.rank, choice.prefill.cached_tokens) == (1, 1000)
    assert (choice.rank, choice.cached_tokens) == (0, 500)
    view = RequestView("m", num_tokens=4000, stream=True)
    open_ones = [InFlight(view, choice.prefill, 0.0) for _ in range(2)]
    assert prefill.tally.rank_tokens == {1: 2 * (3000 + 256)}
    again = chosen([prefill, decode], known=known)
    assert again.prefill is not None
    assert (again.prefill.rank, again.prefill.cached_tokens) == (0, 0), "4,000 tokens wait for less than 1,000 cost"
    decoding = InFlight(view, choice, 0.0)
    assert decode.tally.rank_tokens == {0: 256}, "it computes none of the prompt"
    for one in (*open_ones, decoding):
        one.end(1.0)
        one.end(1.0)
    assert not +prefill.tally.rank_tokens
    assert not +decode.tally.rank_tokens


def test_of_equal_ranks_all_get_some() -> None:
    prefill, decode = of_ranks("p", "prefill"), engine("d", "decode")
    knowledge, clock = Known(p=[0, 0]), lambda: 100.0
    rng = random.Random(0)
    pairing = Pairing(Auto(knowledge, rng, clock), knowledge, 256, True, clock, rng)
    view = RequestView("m", num_tokens=4000, stream=True, may_split=True)
    found = [pairing.choose(view, [decode], [prefill], KvLinks()) for _ in range(40)]
    assert {one.prefill.rank for one in found if one.prefill} == {0, 1}
    assert {one.rank for one in found} == {None}, "an engine with one cache is told of none"


def test_a_busy_decode_engine_is_spared_more() -> None:
    tokens = 4000
    calm, busy = engine("d", "decode"), engine("d", "decode", requests=20)
    alone = local_seconds(Choice(busy), tokens, 100.0) - local_seconds(Choice(calm), tokens, 100.0)
    together = remote_seconds(Choice(P0), Choice(busy), tokens, 100.0) - remote_seconds(
        Choice(P0), Choice(calm), tokens, 100.0
    )
    assert alone > 20 * tokens / busy.rates.prefill.value > together


def test_a_long_queue_at_the_prefill_engines_is_not_joined() -> None:
    crowded = [engine("p0", "prefill", 1, 400_000), engine("p1", "prefill", 1, 400_000)]
    assert ids(chosen([*crowded, D0]))[0] is None
    assert ids(chosen([crowded[0], P1, D0])) == ("p1", "d0"), "the other one is free"


def test_a_slow_network_keeps_prompts_where_they_are_answered() -> None:
    slow = engine("d0", "decode")
    for _ in range(40):
        slow.rates.transfer.bandwidth.observe(1e5, 0.0)  # 4 MB in 40 s
    assert ids(chosen([P0, slow])) == (None, "d0")
    assert ids(chosen([P0, slow, D1])) == ("p0", "d1"), "the other one is near"


def test_what_the_prefill_engine_has_is_worth_going_there() -> None:
    assert ids(chosen([P0, P1, D0], known=Known(p1=3500))) == ("p1", "d0")


def test_an_engine_for_both_computes_what_a_decode_engine_should_not() -> None:
    both = engine("b0", None)
    choice = chosen([both, D0])
    assert (ids(choice), choice.kind) == ((None, "b0"), "none")


def test_one_for_both_serves_as_prefill_only_for_those_that_answer() -> None:
    both = engine("b0", "both", requests=1, queued=100_000)
    busy = engine("d0", "decode", requests=60)
    snapshot = build_snapshot([both, busy])
    assert [one.id for one in snapshot.prefills["m"]] == ["b0"]
    near = engine("b1", "both")
    assert ids(chosen([near, engine("b2", "both")]))[0] is None
    assert not build_snapshot([near]).prefills


def test_only_equal_kv_pairs() -> None:
    other = engine("p9", "prefill", kind="f")
    assert ids(chosen([other, D0])) == (None, "d0")
    assert ids(chosen([other, P0, D0])) == ("p0", "d0")
    old = engine("d9", "decode", kind="f")
    assert ids(chosen([P0, old])) == (None, "d9")
    for _ in range(20):
        assert ids(chosen([other, P0, D0, old])) in {("p9", "d9"), ("p0", "d0")}


def test_a_revision_on_trial_pairs_with_itself_alone() -> None:
    def tried(view: EngineView) -> EngineView:
        endpoint = view.endpoint
        return replace(view, endpoint=Endpoint(endpoint.id, endpoint.url, "m", on_trial=OnTrial("r2", 5)))

    new_prefill, new_decode = tried(engine("p2", "prefill")), tried(engine("d2", "decode"))
    assert ids(chosen([P0, new_decode])) == (None, "d2")
    assert ids(chosen([new_prefill, D0])) == (None, "d0")
    assert ids(chosen([P0, new_prefill, new_decode])) == ("p2", "d2")
    assert ids(chosen([P0, new_prefill, D0])) == ("p0", "d0")


def test_those_of_unknown_facts_are_in_no_pair() -> None:
    silent = replace(D0, facts=None)
    assert ids(chosen([P0, silent])) == (None, "d0")


def test_a_policy_that_keeps_to_an_engine_keeps_to_it() -> None:
    far = engine("d0", "decode", requests=2)
    near = engine("d1", "decode")
    known = Known(d0=3000)
    assert ids(chosen([P0, far, near], known=known, free=False))[1] == "d0"
    assert chosen([P0, far, near], known=known, free=True).kind in {"remote", "local"}


def test_idle_engines_share_cold_prompts() -> None:
    clock = lambda: 100.0  # noqa: E731
    engines = [engine(f"p{n}", "prefill") for n in range(3)] + [engine(f"d{n}", "decode") for n in range(3)]
    known, rng = Known(), random.Random(3)
    pairing = Pairing(Auto(known, rng, clock), known, 256, True, clock, rng)
    snapshot = build_snapshot(engines)
    view = RequestView("m", num_tokens=4000, stream=True, may_split=True)
    counts: Counter[str] = Counter()
    for _ in range(60):
        choice = pairing.choose(view, snapshot.usable["m"], snapshot.prefills["m"], KvLinks())
        assert choice.prefill is not None
        counts[choice.prefill.engine.id] += 1
        counts[choice.engine.id] += 1
        InFlight(view, choice, 100.0)
        InFlight(view, choice.prefill, 100.0)
    assert min(counts.values()) >= 15
    assert len(counts) == 6


def test_engines_that_cannot_pass_k_v_to_each_other_make_no_pair() -> None:
    clock = lambda: 100.0  # noqa: E731
    known = Known()
    pairing = Pairing(Auto(known, random.Random(0), clock), known, 256, True, clock, random.Random(0))
    view, links = RequestView("m", num_tokens=4000, stream=True, may_split=True), KvLinks()
    links.part(P0, D0, 101.0)
    assert {ids(pairing.choose(view, [D0, D1], [P0], links)) for _ in range(20)} == {("p0", "d1")}
    assert {ids(pairing.choose(view, [D0], [P0, P1], links)) for _ in range(20)} == {("p1", "d0")}
    assert ids(pairing.choose(view, [D0], [P0], links)) == (None, "d0")
    assert {score.prefill_id for score in pairing.explain(view, [D0, D1], [P1], links)} == {"", "p1"}


def test_explained_are_all_ways() -> None:
    clock = lambda: 100.0  # noqa: E731
    known = Known()
    pairing = Pairing(Auto(known, random.Random(0), clock), known, 256, True, clock, random.Random(0))
    scores = pairing.explain(RequestView("m", num_tokens=4000, may_split=True), [D0, D1], [P0], KvLinks())
    assert sorted((score.engine_id, score.prefill_id)[1] for score in scores) == ["", "", "p0"]
    assert {score.engine_id for score in scores if not score.prefill_id} == {"d0", "d1"}
    assert min(scores, key=lambda score: score.seconds).prefill_id == "p0"


def test_pairs_are_explained_only_where_they_are_compared() -> None:
    known = Known()
    clock = lambda: 100.0  # noqa: E731
    pairing = Pairing(Auto(known, random.Random(0), clock), known, 256, True, clock, random.Random(0))
    busy = engine("d0", "decode", requests=40)
    short, long = (RequestView("m", num_tokens=tokens, may_split=True) for tokens in (255, 257))
    assert any(score.prefill_id for score in pairing.explain(long, [busy], [P0], KvLinks()))
    assert [(score.engine_id, score.prefill_id) for score in pairing.explain(short, [busy], [P0], KvLinks())] == [
        ("d0", "")
    ]


def test_prefill_engines_get_whole_requests_only_without_others() -> None:
    assert [one.id for one in build_snapshot([P0, D0]).usable["m"]] == ["d0"]
    assert [one.id for one in build_snapshot([P0, P1]).usable["m"]] == ["p0", "p1"]
    assert not build_snapshot([P0, P1]).prefills
    assert [one.id for one in build_snapshot([P0, replace(D0, ready=False)]).usable["m"]] == ["p0"]
    alone = build_snapshot([engine("b", None), engine("c", None)])
    assert (len(alone.usable["m"]), alone.prefills) == (2, {})


def test_blocks_travel_while_later_ones_are_computed() -> None:
    decode = Choice(D0)
    num_bytes = 4000 * 1000
    alone = D0.rates.transfer.late_seconds(num_bytes, 0.0)
    assert alone == pytest.approx(num_bytes / D0.rates.transfer.bandwidth.value)
    assert late_seconds(Choice(P0), decode, 4000) == 0.0, "this link is faster than the prompt is computed"
    cached = late_seconds(Choice(P0, 3999), decode, 4000)
    assert 0.0 < cached < alone, "nothing is left to hide it behind"
    assert late_seconds(Choice(P0, 3999), Choice(D0, 3000), 4000) < cached, "what it has need not come"


def test_bandwidth_is_learned_from_an_engine_s_counters() -> None:
    rates = TransferRates()
    rates.polled(TransferFigures(0.0, 0.0, 0.0), 0.0)
    rates.polled(TransferFigures(5e6, 0.02, 0.03), 1.0)
    assert rates.bandwidth.value == pytest.approx(1e8)
    for told in (None, TransferFigures(5e6, 0.02, 0.03), TransferFigures(0.0, 0.0, 0.0)):
        rates.polled(told, 2.0)
    assert rates.bandwidth.value == pytest.approx(1e8), "nothing came, or it began anew"


def test_the_handover_is_learned_apart_from_what_the_link_takes() -> None:
    siblings = TransferRates()
    rates = TransferRates(siblings)
    for _ in range(30):
        rates.handed_over(0.3, 0.25, 0.0)
    assert rates.handover.value == pytest.approx(0.05, rel=0.05)
    assert TransferRates(siblings).handover.value == pytest.approx(0.05, rel=0.1), "a new one is like its siblings"
    rates.handed_over(0.1, 0.25, 0.0)
    assert rates.handover.value > 0.0


@pytest.mark.parametrize(("role", "is_learned"), [("prefill", False), ("decode", True)])
def test_how_fast_a_model_generates_is_learned_where_it_does(role: KvRole, is_learned: bool) -> None:
    now = 0.0
    table = EndpointTable(clock=lambda: now)
    table.replace([Endpoint(name, f"http://{name}:1", "m") for name in ("one", "sibling")])
    table.set_facts("one", pair_facts("1" * 32, role))
    for number in range(20):
        now += 1.0
        table.set_load("one", running=4, waiting=0, kv_usage=0.1, generated=10.0 * number)
    assert [engine.rates.decode.is_learned for engine in table.snapshot.engines] == [is_learned] * 2


def test_engines_of_both_parts_take_turns_before_any_has_answered() -> None:
    known, clock = Known(), lambda: 100.0
    policy = make_policy("round-robin", known, clock, random.Random(0))
    pairing = Pairing(policy, known, 256, False, clock, random.Random(0))
    view = RequestView("m", num_tokens=4000, stream=True, may_split=True)
    pairs = []
    for _ in range(6):
        choice = pairing.choose(view, [D0, D1], [P0, P1], KvLinks())
        policy.sent(view, choice.computes.engine)  # as the dispatcher does
        pairs.append(ids(choice))
    assert pairs == [("p0", "d0"), ("p1", "d1")] * 3
