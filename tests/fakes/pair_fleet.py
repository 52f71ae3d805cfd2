"""A router before prefill and decode engines without models: what they answer, and when, is a test's to say.

No test in here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields
from pagefleet_protocol.engine_facts import FACTS_PATH, CacheFacts, EngineFacts, KvTransferFacts, encode_facts
from pagefleet_protocol.fleet_key import FleetKey
from pagefleet_protocol.kube_names import RANK_PORTS_APART
from pagefleet_protocol.kv_handoff import KV_FAULT, KV_TRANSFER, KvRole, KvTransfer, decode_kv_transfer
from pagefleet_router.engines.rates import EngineRates

from tests.fakes.faulty_engine import FAST_MONITOR, Behaviour, FaultyEngine, Fleet, Seen, chat, fleet, silent, whole

KEY = FleetKey(b"k" * 40)
LONG = "word " * 800
"""A prompt of a thousand tokens."""
PREFILLED = whole(200, b'{"transfer_id":"x","num_prompt_tokens":1000,"num_cached_tokens":0}')
KV_LOST = whole(503, b'{"error":{"message":"no","type":"x","param":null,"code":"kv_load_failed"}}')
_NOT_MINE = b'{"error":{"message":"no","type":"x","param":null,"code":"invalid_handoff"}}'
NOT_MINE = whole(400, _NOT_MINE)
NOT_BELIEVED = whole(400, _NOT_MINE, f"{KV_FAULT}: not_believed\r\n")
"""The same, from an engine that says that it is not the request."""


def kv_lost(fault: str) -> Behaviour:
    """As `KV_LOST`, from an engine that says whose doing it was."""
    body = b'{"error":{"message":"no","type":"x","param":null,"code":"kv_load_failed"}}'
    return whole(503, body, f"{KV_FAULT}: {fault}\r\n")


def not_from_p0(behave: Behaviour) -> Behaviour:
    """Answer as a decode engine to which no K/V comes from the first engine of the fleet."""

    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await (silent if f"peer={'0' * 32}" in (seen.header(KV_TRANSFER) or "") else behave)(seen, writer)

    return answer


def long_chat(number: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a body whose prompt begins as that of no other number."""
    return chat(f"{number} {LONG}", **fields)


def pair_facts(incarnation: str, role: KvRole | None, compatibility: str = "c" * 64, **fields: Any) -> EngineFacts:
    """Return what an engine says of itself; without a role it passes no K/V."""
    kv = None
    if role is not None:
        kv = KvTransferFacts(role=role, port=7000, compatibility=compatibility, bytes_per_token=1000)
    given: dict[str, Any] = {
        "scope": "s", "block_size": 16, "num_blocks": 10_000, "max_model_len": 8192, "max_num_seqs": 64,
        "max_num_batched_tokens": 512, "vocab_size": 300, **fields,
    }  # fmt: skip
    return EngineFacts(incarnation=incarnation, model="m", kv_transfer=kv, **given)


def with_ranks(facts: EngineFacts, num_ranks: int) -> EngineFacts:
    """Return the facts of an engine with so many data ranks behind its port, that has each 100 blocks."""
    port = None if facts.kv_transfer is None else facts.kv_transfer.port
    caches = tuple(
        CacheFacts(
            incarnation=facts.incarnation[:-1] + f"{rank:x}",
            num_blocks=100,
            kv_transfer_port=None if port is None else port + RANK_PORTS_APART * rank,
        )
        for rank in range(num_ranks)
    )
    return replace_fields(facts, incarnation=caches[0].incarnation, data_ranks=caches)


@dataclass(frozen=True)
class Role:
    """One engine of a fleet."""

    role: KvRole | None
    behave: Behaviour
    compatibility: str = "c" * 64
    num_ranks: int = 1
    """Behind its port."""


def prefill(behave: Behaviour = PREFILLED, **fields: Any) -> Role:
    return Role("prefill", behave, **fields)


def decode(behave: Behaviour | None = None, **fields: Any) -> Role:
    return Role("decode", behave or whole(), **fields)


@dataclass
class Leg:
    """One request as an engine got it; `transfer` is None where it is a whole one."""

    engine: str
    seen: Seen
    transfer: KvTransfer | None


@dataclass
class PairFleet:
    """Names its engines p0, p1, ... and d0, d1, ... in the order given."""

    made: Fleet
    names: list[str]
    log: list[Leg] = field(default_factory=list)
    """Everything that engines got, in order."""

    def engine(self, name: str) -> FaultyEngine:
        return self.made.engines[self.names.index(name)]

    def of(self, letter: str) -> list[Leg]:
        """Return what engines of a kind got."""
        return [leg for leg in self.log if leg.engine.startswith(letter)]

    def metric(self, line: str) -> float:
        """Return a sample of the router's metrics; 0 where there is none."""
        text = self.made.router.metrics.text().decode()
        return sum(float(one.rpartition(" ")[2]) for one in text.splitlines() if one.startswith(line + " "))


def _noted(fleet_: PairFleet, name: str, incarnation: str, behave: Behaviour, num_ranks: int) -> Behaviour:
    async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
        value = seen.header(KV_TRANSFER)
        known = fleet_.engine(name).incarnation or incarnation
        try:
            others = [known[:-1] + f"{rank:x}" for rank in range(1, num_ranks)]
            transfer = None if value is None else decode_kv_transfer(value, KEY, known, *others)
        except ValueError:
            fleet_.log.append(Leg(name, seen, None))
            await NOT_MINE(seen, writer)
            return
        fleet_.log.append(Leg(name, seen, transfer))
        await behave(seen, writer)

    return answer


@contextlib.asynccontextmanager
async def pair_fleet(folder: Path, roles: Sequence[Role], **settings: Any) -> AsyncIterator[PairFleet]:
    """Start engines that tell their roles, and a router that knows them."""
    (folder / "fleet-key").write_bytes(KEY.secret)
    given = {"policy": "auto", "kv_events": False, "fleet_key_file": folder / "fleet-key", "explain": True, **settings}
    given.setdefault("monitor", FAST_MONITOR)
    async with fleet(folder, *(role.behave for role in roles), **given) as made:
        letters = ["d" if role.role == "decode" else "p" if role.role == "prefill" else "b" for role in roles]
        names = [f"{letter}{letters[:i].count(letter)}" for i, letter in enumerate(letters)]
        fleet_ = PairFleet(made, names)
        for number, (engine, role) in enumerate(zip(made.engines, roles, strict=True)):
            incarnation = f"{number:x}" * 32
            engine.behave = _noted(fleet_, names[number], incarnation, role.behave, role.num_ranks)
            told = pair_facts(incarnation, role.role, role.compatibility)
            if role.num_ranks > 1:
                told = with_ranks(told, role.num_ranks)
            engine.internal[FACTS_PATH] = encode_facts(told)
            engine.incarnation = told.incarnation
        table = made.router.table
        await made.until(lambda: all(engine.facts is not None for engine in table.snapshot.engines))
        for view in table.snapshot.engines:
            _teach(view.rates)
        yield fleet_


def _teach(rates: EngineRates) -> None:
    """Have engines known as such that another one should compute prompts: here they answer in no time."""
    now = time.monotonic()
    for _ in range(32):
        rates.prefill.observe(10_000.0, now)
        rates.transfer.handover.observe(1e-3, now)


def id_of(fleet_: PairFleet, name: str) -> str:
    """Return how the router calls an engine."""
    return f"e{fleet_.names.index(name)}"


def code_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["code"])
