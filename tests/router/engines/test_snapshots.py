"""Snapshots: whatever happened to a table, the next one shows what grouping all engines anew would."""

from __future__ import annotations

import random
from collections import defaultdict

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from pagefleet_protocol.endpoints import Endpoint
from pagefleet_protocol.engine_facts import EngineFacts, KvTransferFacts
from pagefleet_protocol.kv_handoff import KvRole
from pagefleet_router.engines import endpoints
from pagefleet_router.engines.endpoints import EndpointTable, EngineView

from tests.example_counts import examples

ROLES: tuple[KvRole | None, ...] = (None, None, "both", "prefill", "decode")


def facts(role: KvRole | None) -> EngineFacts:
    kv = None if role is None else KvTransferFacts(role=role, port=1, compatibility="c" * 64, bytes_per_token=1)
    return EngineFacts(
        incarnation="1" * 32, model="m", scope="s", block_size=16, num_blocks=100, max_model_len=256, max_num_seqs=8,
        max_num_batched_tokens=512, vocab_size=300, kv_transfer=kv,
    )  # fmt: skip


def usable_and_prefills(its: list[EngineView]) -> tuple[list[EngineView], list[EngineView]]:
    found = [one for one in its if one.ready and not one.ejected and not one.endpoint.draining]
    whole = [one for one in found if one.role != "prefill"]
    if not whole or all(one.role == "both" for one in found):
        return found, []
    passing = [one for one in found if one.facts is not None and one.facts.kv_transfer is not None]
    return whole, [one for one in passing if one.role != "decode"]


def change(table: EndpointTable, rng: random.Random) -> None:
    name = f"e{rng.randrange(8)}"
    kind = rng.randrange(6)
    if kind == 0:
        listed = rng.sample(range(8), rng.randrange(3, 9))
        models = {number: rng.choice("mmn") for number in listed}
        draining = {number: rng.random() < 0.1 for number in listed}
        table.replace([Endpoint(f"e{n}", f"http://h:{n + 1}", models[n], draining=draining[n]) for n in listed])
    elif kind == 1:
        table.set_ejected(name, rng.random() < 0.3)
    elif kind == 2:
        table.set_facts(name, rng.choice([None, *map(facts, ROLES)]))
    elif kind == 3:
        table.set_load(name, rng.randrange(3), 0.0, 0.5)
    else:
        table.set_ready(name, rng.random() < 0.8)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**32))
def test_a_snapshot_shows_what_grouping_all_anew_would(seed: int) -> None:
    rng = random.Random(seed)
    table = EndpointTable(kept=("k",))
    table.replace([Endpoint(f"e{number}", f"http://h:{number + 1}", "m") for number in range(8)])
    for _ in range(60):
        for _ in range(rng.randrange(1, 4)):
            change(table, rng)
        shown = table.snapshot
        engines = [table.engine(one.id) for one in shown.engines]
        assert list(shown.engines) == engines
        by_model: dict[str, list[EngineView]] = defaultdict(list)
        for one in shown.engines:
            by_model[one.endpoint.model].append(one)
        for model in shown.usable:
            usable, prefills = usable_and_prefills(by_model[model])
            assert list(shown.usable[model]) == usable
            assert list(shown.prefills.get(model, ())) == prefills
            assert table.num_engines(model) == len(by_model[model])
        assert {"k", "m", *by_model} <= shown.usable.keys()
        assert all(shown.prefills.values())


def test_a_change_costs_no_look_at_the_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    table = EndpointTable()
    table.replace([Endpoint(f"e{number}", f"http://h:{number + 1}", "m") for number in range(1000)])
    assert table.snapshot.usable["m"] == ()
    looks = 0
    is_usable = endpoints.is_usable

    def counted(engine: EngineView) -> bool:
        nonlocal looks
        looks += 1
        return is_usable(engine)

    monkeypatch.setattr(endpoints, "is_usable", counted)
    for number in range(1000):
        table.set_ready(f"e{number}", True)
        assert len(table.snapshot.usable["m"]) == number + 1
    assert looks <= 5 * 1000
