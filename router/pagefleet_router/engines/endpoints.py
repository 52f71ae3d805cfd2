"""What the router knows of its engines: immutable snapshots, each made of the last one and of what changed since.

What is live is beside them: each engine's `Tally`, our own count of what runs there, and its `EngineRates`. All
snapshots of an engine share these two.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pagefleet_protocol.endpoints import Endpoint, OnTrial
from pagefleet_protocol.engine_facts import EngineFacts
from pagefleet_protocol.kv_handoff import KvRole

from pagefleet_router.engines.rates import EngineRates, TransferFigures
from pagefleet_router.engines.tally import Tally

MAX_KEPT = 256
"""Models that are remembered when their endpoints are gone."""


@dataclass(frozen=True, slots=True)
class PolledLoad:
    """What an engine said of itself at the last poll."""

    num_running: float = 0.0
    num_waiting: float = 0.0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    num_foreign: float = 0.0
    """Running and waiting requests that did not come through this router."""


@dataclass(frozen=True, slots=True, eq=False)
class EngineView:
    """One engine, as the scheduler sees it."""

    endpoint: Endpoint
    ready: bool = False
    ejected: bool = False
    stuck: bool = False
    """It makes no progress though it has work, or answers no probe any more."""
    load: PolledLoad | None = None
    """None: it was not asked yet, or does not answer."""
    tally: Tally = field(default_factory=Tally)
    """Counts for one incarnation."""
    rates: EngineRates = field(default_factory=EngineRates)
    """Learned, and kept when it restarts: it is the same machine."""
    usable_since: float = -math.inf
    """When it last began to get requests, on the table's clock."""
    facts: EngineFacts | None = None
    """None: it was not asked yet, or says nothing of itself."""

    def with_load(self, load: PolledLoad | None) -> EngineView:
        """Return it as of another poll. Polls come in thousands, and `replace` takes twice as long."""
        return EngineView(
            self.endpoint, self.ready, self.ejected, self.stuck, load, self.tally, self.rates, self.usable_since,
            self.facts,
        )  # fmt: skip

    @property
    def id(self) -> str:
        """The endpoint's id."""
        return self.endpoint.id

    @property
    def cache_ids(self) -> Sequence[str]:
        """Names of its caches, one for each data rank behind its port: of a single one the engine's own."""
        ranks = () if self.facts is None else self.facts.data_ranks
        return [cache_id(self.id, rank) for rank in range(len(ranks))] if ranks else (self.id,)

    @property
    def role(self) -> KvRole:
        """What it is for; `both` where it passes no K/V."""
        facts = self.facts
        return "both" if facts is None or facts.kv_transfer is None else facts.kv_transfer.role

    @property
    def num_requests(self) -> float:
        """Requests that the engine has now, as far as we know."""
        load = self.load
        return self.tally.num_requests if load is None else self.tally.num_requests + load.num_foreign

    @property
    def kv_usage(self) -> float:
        """Share of its KV that requests hold, those included that were sent since it said so."""
        if self.load is None:
            return 0.0
        if self.facts is None:
            return self.load.kv_usage
        return self.load.kv_usage + self.tally.unpolled / (self.facts.num_blocks * self.facts.block_size)

    @property
    def state(self) -> str:
        """One word for the metrics."""
        if self.endpoint.draining:
            return "draining"
        if self.ejected:
            return "ejected"
        return "ready" if self.ready else "unready"


def cache_id(engine_id: str, rank: int) -> str:
    """Return the name of a data rank's cache; no engine is called so, as spaces are not for headers."""
    return f"{engine_id} rank {rank}"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All engines at one moment.

    `usable` holds, for every model that an endpoint names, the engines that may get new requests: those made for
    prompts alone only where there are no others. `prefills` holds, for models with engines made for one part, those
    that can compute prompts for others. `aliases` maps other names to models; a model of that very name comes first.
    """

    engines: tuple[EngineView, ...] = ()
    usable: Mapping[str, tuple[EngineView, ...]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefills: Mapping[str, tuple[EngineView, ...]] = field(default_factory=dict)
    """Empty where no engine has a role: then nothing of this costs a request any time."""
    trials: Mapping[str, OnTrial] = field(default_factory=dict)
    """For models with engines of a revision that is tried out: which, and how many requests it gets. Else empty."""

    @property
    def models(self) -> tuple[str, ...]:
        """The served models, in the order of the endpoints."""
        return tuple(self.usable)

    @property
    def names(self) -> tuple[str, ...]:
        """Every name that a request may use: the models, then their aliases."""
        return (*self.usable, *(alias for alias, model in self.aliases.items() if self._is_served(alias, model)))

    def model_of(self, name: str) -> str | None:
        """Return the model that a name stands for; None when it is not served."""
        if name in self.usable:
            return name
        model = self.aliases.get(name)
        return model if model in self.usable else None

    def _is_served(self, alias: str, model: str) -> bool:
        return alias not in self.usable and model in self.usable


def is_usable(engine: EngineView) -> bool:
    """Whether an engine may get new requests: the filter that does not depend on the request."""
    endpoint = engine.endpoint
    return engine.ready and not engine.ejected and not endpoint.draining and not endpoint.coming


def build_snapshot(
    engines: Sequence[EngineView], aliases: Mapping[str, str] = MappingProxyType({}), kept: Iterable[str] = ()
) -> Snapshot:
    """Group the usable engines by model; models that are `kept` are served even when no endpoint names them."""
    return _snapshot(engines, _group(engines), aliases, kept)


def _snapshot(
    engines: Sequence[EngineView], groups: Mapping[str, _Group], aliases: Mapping[str, str], kept: Iterable[str]
) -> Snapshot:
    parts = {model: its.parts() for model, its in groups.items()}
    usable = {model: whole for model, (whole, _) in parts.items()}
    usable |= {model: () for model in kept if model not in usable}
    prefills = {model: those for model, (_, those) in parts.items() if those}
    endpoints = [engine.endpoint for engine in engines if engine.endpoint.on_trial is not None]
    trials = {one.model: one.on_trial for one in endpoints if one.on_trial is not None}
    return Snapshot(tuple(engines), usable, aliases, prefills, trials)


def _can_prefill(engine: EngineView) -> bool:
    return engine.role != "decode" and engine.facts is not None and engine.facts.kv_transfer is not None


class _Ordered:
    """Some engines of a list in its order: one is put in or taken out without a look at the others."""

    __slots__ = ("_places", "engines")

    def __init__(self) -> None:
        self._places: list[int] = []
        self.engines: list[EngineView] = []

    def put(self, place: int, engine: EngineView | None) -> None:
        """Have this engine, or none, at a place of the list."""
        at = bisect_left(self._places, place)
        is_there = at < len(self._places) and self._places[at] == place
        if engine is None:
            if is_there:
                del self._places[at], self.engines[at]
        elif is_there:
            self.engines[at] = engine
        else:
            self._places.insert(at, place)
            self.engines.insert(at, engine)


class _Group:
    """The engines of one model."""

    __slots__ = ("_found", "_prefills", "_whole", "_with_role", "num_engines")

    def __init__(self) -> None:
        self.num_engines = 0
        self._found = _Ordered()
        """Those that may get requests."""
        self._whole = _Ordered()
        """Of these, those that are not for prompts alone."""
        self._prefills = _Ordered()
        """Of these, those that can compute prompts for others."""
        self._with_role: set[int] = set()
        """Of these, the places of those that are for one part."""

    def put(self, place: int, engine: EngineView) -> None:
        """Take an engine as it is now."""
        found = engine if is_usable(engine) else None
        role = "both" if found is None else found.role
        self._found.put(place, found)
        self._whole.put(place, None if role == "prefill" else found)
        self._prefills.put(place, found if found is not None and _can_prefill(found) else None)
        if role == "both":
            self._with_role.discard(place)
        else:
            self._with_role.add(place)

    def parts(self) -> tuple[tuple[EngineView, ...], tuple[EngineView, ...]]:
        """Return those that may get new requests, and those that may compute prompts for others."""
        if not self._with_role or not self._whole.engines:
            return tuple(self._found.engines), ()
        return tuple(self._whole.engines), tuple(self._prefills.engines)


def _group(engines: Sequence[EngineView]) -> dict[str, _Group]:
    """Return the groups of a list."""
    groups: dict[str, _Group] = {}
    for place, engine in enumerate(engines):
        its = groups.setdefault(engine.endpoint.model, _Group())
        its.num_engines += not engine.endpoint.coming
        its.put(place, engine)
    return groups


class EndpointTable:
    """Holds what is current, of which `snapshot` is a picture.

    A picture is made when somebody looks and something has changed: an engine that did is put in its place among those
    of its model, and all else is the last one's.

    `on_change` is called with the ids that left and the ids that came whenever the list itself changes. An id in
    both is another engine under an old name.

    Args:
        aliases: other names of models, for every snapshot.
        clock: seconds, monotonic.
        kept: models that are served even while no endpoint names them; None: only those that endpoints name. Where it
            is given, models that endpoints name are kept too, up to MAX_KEPT.
    """

    def __init__(
        self, aliases: Mapping[str, str] = MappingProxyType({}), clock: Callable[[], float] = time.monotonic,
        kept: Iterable[str] | None = None,
    ) -> None:  # fmt: skip
        self._keeps = kept is not None
        self._kept = dict.fromkeys(kept or ())
        self._snapshot = build_snapshot((), aliases, self._kept)
        self._engines: list[EngineView] = []
        self._places: dict[str, int] = {}
        """By id, in the list."""
        self._changed: set[int] = set()
        """Places of those that the snapshot does not show as they are."""
        self._groups: dict[str, _Group] = {}
        """By model."""
        self.siblings: dict[str, EngineRates] = {}
        """For each model what its engines have in common: where a new one starts."""
        self.unlisted: str | None = "the engines are being looked up"
        """Why there is no list; None once there has been one."""
        self._clock = clock
        self._listeners: list[Callable[[set[str], set[str]], None]] = []
        self._facts_listeners: list[Callable[[EngineView, EngineFacts | None], None]] = []
        self._watchers: list[Callable[[], None]] = []

    @property
    def snapshot(self) -> Snapshot:
        """All engines as they are now."""
        if self._changed:
            self._snapshot = self._renewed(self._snapshot)
        return self._snapshot

    @property
    def trials(self) -> Mapping[str, OnTrial]:
        """What is tried out now, by model: looked up without a look at the engines."""
        return self._snapshot.trials

    def watch(self, on_snapshot: Callable[[], None]) -> None:
        """Ask to be told when the engines that get requests change, or what they are; not of their loads."""
        self._watchers.append(on_snapshot)

    def subscribe_to_facts(self, on_facts: Callable[[EngineView, EngineFacts | None], None]) -> None:
        """Ask to be told when an engine's facts change, with the engine as it is now and the facts before."""
        self._facts_listeners.append(on_facts)

    def subscribe(self, on_change: Callable[[set[str], set[str]], None]) -> None:
        """Ask to be told when engines leave or come."""
        self._listeners.append(on_change)

    def replace(self, endpoints: Sequence[Endpoint]) -> None:
        """Take over a new list. An engine whose id and URL stay keeps its state; any other starts unready."""
        known = {engine.id: engine for engine in self._engines}
        engines, came = [], set()
        for endpoint in endpoints:
            old = known.get(endpoint.id)
            if old is not None and (old.endpoint.url, old.endpoint.model) == (endpoint.url, endpoint.model):
                engines.append(old if old.endpoint == endpoint else replace(old, endpoint=endpoint))
                del known[endpoint.id]
            else:
                engines.append(EngineView(endpoint, rates=self.new_rates(endpoint.model)))
                came.add(endpoint.id)
        self.unlisted = None
        if self._keeps:
            for engine in engines:
                if len(self._kept) < MAX_KEPT:
                    self._kept[engine.endpoint.model] = None
        self._show(engines)
        if came or known:
            for listener in self._listeners:
                listener(set(known), came)

    def new_rates(self, model: str) -> EngineRates:
        """Return the rates of an engine that nothing is known of yet."""
        return EngineRates(self.siblings.setdefault(model, EngineRates()))

    def explain(self, reason: str) -> None:
        """Note why there is no list, unless there has been one, which stays in force."""
        if self.unlisted is not None:
            self.unlisted = reason

    def engine(self, engine_id: str) -> EngineView | None:
        """Return one engine as it is now, None when it left."""
        place = self._places.get(engine_id)
        return None if place is None else self._engines[place]

    def num_engines(self, model: str) -> int:
        """Return how many engines a model has, whatever their state; those that are yet to come are none."""
        its = self._groups.get(model)
        return 0 if its is None else its.num_engines

    def set_ready(self, engine_id: str, ready: bool, stuck: bool = False) -> bool:
        """Note what a probe found; returns whether that is news."""
        engine = self.engine(engine_id)
        if engine is None or (engine.ready, engine.stuck) == (ready, stuck):
            return False
        self._put(replace(engine, ready=ready, stuck=stuck))
        return True

    def set_ejected(self, engine_id: str, ejected: bool) -> None:
        """Note an ejection or its end."""
        engine = self.engine(engine_id)
        if engine is not None and engine.ejected != ejected:
            self._put(replace(engine, ejected=ejected))

    def set_load(
        self, engine_id: str, running: float, waiting: float, kv_usage: float, generated: float | None = None,
        transfer: TransferFigures | None = None,
    ) -> None:  # fmt: skip
        """Note what a poll found; `generated`: the engine's counter of tokens, `transfer`: those of K/V."""
        engine = self.engine(engine_id)
        if engine is None:
            return
        # One token for each prompt says nothing of how fast its model generates, which its siblings would believe.
        engine.rates.polled(None if engine.role == "prefill" else generated, running, self._clock())
        engine.rates.transfer.polled(transfer, self._clock())
        engine.tally.unpolled = 0
        foreign = max(0.0, running + waiting - engine.tally.num_requests)
        load = PolledLoad(running, waiting, kv_usage, foreign)
        if load != engine.load:
            self._take(engine.with_load(load))

    def set_facts(self, engine_id: str, facts: EngineFacts | None) -> None:
        """Note what an engine says of itself. Another incarnation of it has none of the old one's requests."""
        engine = self.engine(engine_id)
        if engine is None or engine.facts == facts:
            return
        before = engine.facts
        is_another = before is not None and (facts is None or facts.incarnation != before.incarnation)
        now = replace(engine, facts=facts)
        if is_another:
            now = replace(now, tally=Tally(), usable_since=self._clock())
        self._put(now)
        for listener in self._facts_listeners:
            listener(now, before)

    def forget_load(self, engine_id: str) -> None:
        """Drop the last poll's figures: the engine does not answer any more."""
        engine = self.engine(engine_id)
        if engine is not None and engine.load is not None:
            self._take(engine.with_load(None))

    def _take(self, new: EngineView) -> None:
        place = self._places[new.id]
        self._engines[place] = new
        self._changed.add(place)

    def _put(self, new: EngineView) -> None:
        old = self._engines[self._places[new.id]]
        if is_usable(new) and not is_usable(old):
            new = replace(new, usable_since=self._clock())
        self._take(new)
        self._tell_watchers()

    def _show(self, engines: list[EngineView]) -> None:
        self._engines = engines
        self._places = {engine.id: place for place, engine in enumerate(engines)}
        self._changed.clear()
        self._groups = _group(engines)
        self._snapshot = _snapshot(engines, self._groups, self._snapshot.aliases, self._kept)
        self._tell_watchers()

    def _tell_watchers(self) -> None:
        for watcher in self._watchers:
            watcher()

    def _renewed(self, old: Snapshot) -> Snapshot:
        usable, prefills = dict(old.usable), dict(old.prefills)
        changed, self._changed = self._changed, set()
        for place in changed:
            engine = self._engines[place]
            self._groups[engine.endpoint.model].put(place, engine)
        for model in {self._engines[place].endpoint.model for place in changed}:
            usable[model], prefills[model] = self._groups[model].parts()
            if not prefills[model]:
                del prefills[model]
        return Snapshot(tuple(self._engines), usable, old.aliases, prefills, old.trials)
